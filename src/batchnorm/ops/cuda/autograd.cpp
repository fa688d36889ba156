// Runs ordinary training calls in C++, to avoid the overhead of Python. For these calls, this file does the work of
// autograd.py and launch.py.
//
// Python chooses the kernels for tensors of given shapes, strides and types, launches them the first time, and
// describes the launches to this file (add_forward, add_backward). This file then handles later calls of the same kind:
// it allocates the outputs, launches the kernels and records the call for autograd. Python handles calls that are
// unusual or not yet described. For such calls, train_ returns None to its caller in autograd.py. The torch operators
// and the backward pass in this file instead call the Python functions that were passed to configure().

#define PY_SSIZE_T_CLEAN
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/library.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <atomic>
#include <mutex>
#include <unordered_map>

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Optional = std::optional<Tensor>;
using Triple = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// configure() sets these variables: functions of the CUDA driver and of torch's C interface, the class nn.Parameter,
// and Python functions that handle what this file does not support.
static int (*launch_kernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
static int (*launch_cooperative)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**);
static int (*stream_is_capturing)(void*, int*);
static int32_t (*current_stream)(int32_t, void**);
static PyObject *parameter_class, *python_backward, *python_fused, *python_fused_, *python_fused_backward;
static PyObject *python_differentiable, *python_differentiable_;

// ---- launches

union Value {
  const void* P;
  float f;
  int32_t i;
};

struct Write {
  int offset, slot;  // where to write the value in a copy of Launch::image, and the value's index in the array `values`
  char kind;  // the value's type, as a format character of Python's struct module: P, f or i
};

struct Launch {
  void* function;
  unsigned programs, threads, shared;
  bool cooperative;
  std::string image;  // all arguments, concatenated; each launch copies this string and applies `writes` to the copy
  std::vector<int> offsets;  // the offset of each argument in `image`
  std::vector<Write> writes;

  static constexpr size_t BYTES = 1024, ARGUMENTS = 64;

  bool operator()(const Value* values, void* stream) const {
    alignas(16) char memory[BYTES];
    void* pointers[ARGUMENTS];
    std::memcpy(memory, image.data(), image.size());
    for (const auto& w : writes) std::memcpy(memory + w.offset, &values[w.slot], w.kind == 'P' ? 8 : 4);
    for (size_t k = 0; k < offsets.size(); ++k) pointers[k] = memory + offsets[k];
    const int result = cooperative
        ? launch_cooperative(function, programs, 1, 1, threads, 1, 1, shared, stream, pointers)
        : launch_kernel(function, programs, 1, 1, threads, 1, 1, shared, stream, pointers, nullptr);
    return result == 0;
  }
};

struct Pass {
  std::vector<int64_t> strides;  // the strides of the outputs
  std::vector<int64_t> bits;  // the shape of the sign bits (see sign_bits.py); empty if none are saved
  int64_t floats, words;  // the size of the workspace: the number of floats and of int32 counters
  std::vector<Launch> launches;
};

// ---- the passes that Python has described, keyed by everything that the choice of launches depends on

struct Key {
  std::array<int64_t, 32> numbers{};
  size_t size = 0;

  void add(int64_t n) { numbers[size++] = n; }
  void add(const Tensor& t) { add(t.defined() ? 1 + static_cast<int64_t>(t.scalar_type()) : 0); }
  void add(at::IntArrayRef list) {
    add(static_cast<int64_t>(list.size()));
    for (const auto n : list) add(n);
  }
  bool operator==(const Key& other) const { return size == other.size && numbers == other.numbers; }
};

struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t h = 14695981039346656037ull;
    for (size_t k = 0; k < key.size; ++k) h = (h ^ static_cast<uint64_t>(key.numbers[k])) * 1099511628211ull;
    return h ^ (h >> 32);
  }
};

struct Room {
  const void *floats = nullptr, *words = nullptr;
  int64_t float_count = 0, word_count = 0;
};

// Autograd runs backward passes on other threads, so the mutex protects both maps. Passes are never removed, so
// pointers to them stay valid.
static std::mutex mutex;
static std::unordered_map<Key, Pass, Hash> passes;
static std::unordered_map<int64_t, std::unordered_map<const void*, Room>> rooms;  // workspaces by device and stream

static const Pass* find(const Key& key) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = passes.find(key);
  return found == passes.end() ? nullptr : &found->second;
}

static std::atomic<int64_t> forward_passes{0}, backward_passes{0};  // how many passes this file ran, without Python

constexpr int MAX_DIMS = 5;

struct Call {
  const Tensor &x, &gamma, &beta, &residual, &mean, &var, &batches, &skipped;
  std::optional<double> momentum;
  double eps;
  int64_t code;  // the activation's index in `NAMES` of activation.py
  double slope;
  bool keep_bits;

  Key key() const {
    Key k;
    k.add(mean.defined() ? 1 : 0), k.add(x), k.add(x.sizes()), k.add(x.strides()), k.add(x.get_device());
    k.add(gamma), k.add(beta), k.add(residual), k.add(code), k.add(keep_bits), k.add(momentum.has_value());
    return k;
  }
};

struct Gradient {
  const Tensor &dy, &x, &residual, &bits, &stats;
  int64_t code;
  double slope;
  std::optional<at::ScalarType> residual_dtype;  // nullopt if the kernels should not write the residual's gradient

  Key key() const {
    Key k;
    k.add(2), k.add(x), k.add(x.sizes()), k.add(x.strides()), k.add(x.get_device()), k.add(dy), k.add(dy.strides());
    k.add(residual), k.add(bits.defined() ? bits.dim() : 0), k.add(code);
    k.add(residual_dtype ? 1 + static_cast<int64_t>(*residual_dtype) : 0);
    return k;
  }
};

static bool is_aligned(const Tensor& t) { return !t.defined() || (reinterpret_cast<uintptr_t>(t.data_ptr()) & 15) == 0; }
static const void* address(const Tensor& t) { return t.defined() ? t.data_ptr() : nullptr; }

// Returns whether a tensor is undefined, or is on x's device and aligned to 16 bytes.
static bool fits(const Tensor& t, const Tensor& x) {
  return !t.defined() || (t.get_device() == x.get_device() && is_aligned(t));
}
static bool is_vector(const Tensor& t, int64_t channels) {
  return !t.defined() || (t.dim() == 1 && t.size(0) == channels && t.is_contiguous());
}

// Finds the current stream and its workspace. Returns false if Python has to handle the call: if a CUDA graph is being
// captured, the workspace is too small, or the stream cannot be queried.
static bool find_room(const Tensor& x, const Pass& pass, void*& stream, Room& room) {
  int capturing = 0;
  if (current_stream(x.get_device(), &stream) != 0 || stream_is_capturing(stream, &capturing) != 0 || capturing != 0)
    return false;
  std::lock_guard<std::mutex> lock(mutex);
  room = rooms[x.get_device()][stream];
  return room.float_count >= pass.floats && room.word_count >= pass.words;
}

// Launches a pass's kernels. Returns false if the first launch fails, and throws if a later launch fails.
static bool launch_all(const Pass& pass, const Value* values, void* stream) {
  for (size_t k = 0; k < pass.launches.size(); ++k)
    if (!pass.launches[k](values, stream)) {
      TORCH_CHECK(
          k == 0,
          "a CUDA kernel failed to launch after an earlier kernel of the same pass was launched; set"
          " CUDA_LAUNCH_BLOCKING=1 in the environment to find the operation that failed first");
      return false;
    }
  return true;
}

static Tensor empty(at::IntArrayRef shape, const Tensor& like, at::ScalarType type) {
  return at::empty(shape, like.options().dtype(type).requires_grad(false));
}

static bool are_ordinary(const Call& c) {
  const auto& x = c.x;
  if (x.dim() < 2 || x.dim() > MAX_DIMS || x.numel() <= x.size(1) || !is_aligned(x)) return false;
  const auto channels = x.size(1);
  for (const auto* t : {&c.gamma, &c.beta, &c.mean, &c.var})
    if (!fits(*t, x) || !is_vector(*t, channels)) return false;
  if (!fits(c.residual, x) || (c.residual.defined() && c.residual.sizes() != x.sizes())) return false;
  if (!c.mean.defined()) return true;
  for (const auto* t : {&c.mean, &c.var})
    if (t->scalar_type() != at::kFloat) return false;
  for (const auto* t : {&c.batches, &c.skipped})
    if (!fits(*t, x) || t->scalar_type() != at::kLong || t->numel() != 1) return false;
  return true;
}

// Runs a forward pass, and updates the running averages if the call has any. Returns y, the statistics and the sign
// bits, or nullopt if Python has to handle the call.
static std::optional<Triple> forward(const Call& c) {
  if (!are_ordinary(c)) return std::nullopt;
  const auto* pass = find(c.key());
  if (pass == nullptr || (c.residual.defined() && c.residual.strides() != at::IntArrayRef(pass->strides)))
    return std::nullopt;
  const c10::DeviceGuard guard(c.x.device());
  void* stream = nullptr;
  Room room;
  if (!find_room(c.x, *pass, stream, room)) return std::nullopt;
  const auto options = c.x.options().requires_grad(false);
  const auto y = at::empty_strided(c.x.sizes(), pass->strides, options);
  const auto stats = empty({8, c.x.size(1)}, c.x, at::kFloat);
  const auto bits = pass->bits.empty() ? Tensor() : empty(pass->bits, c.x, at::kByte);
  Value values[17] = {};
  const Tensor* tensors[] = {&c.x, &y, &c.residual, &bits, &c.gamma, &c.beta, &stats};
  for (int k = 0; k < 7; ++k) values[k].P = address(*tensors[k]);
  values[7].P = room.floats, values[8].P = room.words;
  const Tensor* running[] = {&c.mean, &c.var, &c.batches, &c.skipped};
  for (int k = 0; k < 4; ++k) values[9 + k].P = address(*running[k]);
  values[13].f = static_cast<float>(c.momentum.value_or(0.0)), values[14].i = !c.momentum.has_value();
  values[15].f = static_cast<float>(c.eps), values[16].f = static_cast<float>(c.slope);
  if (!launch_all(*pass, values, stream)) return std::nullopt;
  for (const auto* t : running)
    if (t->defined()) t->unsafeGetTensorImpl()->bump_version();
  ++forward_passes;
  return Triple{y, stats, bits};
}

// Runs a backward pass. Returns dx, dgamma, dbeta and the residual's gradient, or nullopt if Python has to handle the
// call.
static std::optional<Four> backward(const Gradient& g) {
  const auto& x = g.x;
  if (!g.dy.defined() || x.dim() < 2 || x.dim() > MAX_DIMS || g.dy.sizes() != x.sizes()) return std::nullopt;
  for (const auto* t : {&g.dy, &x, &g.residual, &g.bits, &g.stats})
    if (!fits(*t, x)) return std::nullopt;
  const auto* pass = find(g.key());
  if (pass == nullptr || (g.residual.defined() && g.residual.strides() != at::IntArrayRef(pass->strides)))
    return std::nullopt;
  const c10::DeviceGuard guard(x.device());
  void* stream = nullptr;
  Room room;
  if (!find_room(x, *pass, stream, room)) return std::nullopt;
  const auto options = x.options().requires_grad(false);
  const auto dx = at::empty_strided(x.sizes(), pass->strides, options);
  const auto dresidual =
      g.residual_dtype ? at::empty_strided(x.sizes(), pass->strides, options.dtype(*g.residual_dtype)) : Tensor();
  const auto dgamma = empty({x.size(1)}, x, at::kFloat), dbeta = empty({x.size(1)}, x, at::kFloat);
  Value values[12] = {};
  const Tensor* tensors[] = {&g.dy, &x, &g.residual, &g.bits, &g.stats, &dx, &dresidual, &dgamma, &dbeta};
  for (int k = 0; k < 9; ++k) values[k].P = address(*tensors[k]);
  values[9].P = room.floats, values[10].P = room.words, values[11].f = static_cast<float>(g.slope);
  if (!launch_all(*pass, values, stream)) return std::nullopt;
  ++backward_passes;
  return Four{dx, dgamma, dbeta, dresidual};
}

// ---- calling Python

struct Gil {
  PyGILState_STATE state = PyGILState_Ensure();
  ~Gil() { PyGILState_Release(state); }
};

struct NoGil {
  PyThreadState* state = PyEval_SaveThread();
  ~NoGil() { PyEval_RestoreThread(state); }
};

static PyObject* wrap(const Tensor& t) { return t.defined() ? THPVariable_Wrap(t) : Py_NewRef(Py_None); }
static PyObject* wrap(const Optional& t) { return wrap(t.value_or(Tensor())); }
static PyObject* wrap(double v) { return PyFloat_FromDouble(v); }
static PyObject* wrap(std::optional<double> v) { return v ? wrap(*v) : Py_NewRef(Py_None); }
static PyObject* wrap(int64_t v) { return PyLong_FromLongLong(v); }
static PyObject* wrap(bool v) { return PyBool_FromLong(v); }
static PyObject* wrap(std::string_view v) { return PyUnicode_FromStringAndSize(v.data(), v.size()); }
static PyObject* wrap(std::optional<at::ScalarType> v) {
  return Py_NewRef(v ? reinterpret_cast<PyObject*>(torch::getTHPDtype(*v)) : Py_None);
}
static PyObject* wrap(at::IntArrayRef v) {
  auto* tuple = PyTuple_New(v.size());
  for (size_t k = 0; k < v.size(); ++k) PyTuple_SET_ITEM(tuple, k, wrap(v[k]));
  return tuple;
}

template <typename... Args>
static variable_list call_python(PyObject* function, const Args&... args) {
  const Gil gil;
  THPObjectPtr given(PyTuple_New(sizeof...(args)));
  Py_ssize_t k = 0;
  (PyTuple_SET_ITEM(given.get(), k++, wrap(args)), ...);
  THPObjectPtr results(PyObject_CallObject(function, given.get()));
  THPObjectPtr items(results ? PySequence_Tuple(results.get()) : nullptr);
  if (!items) throw python_error();
  variable_list found;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items.get()); ++i) {
    auto* item = PyTuple_GET_ITEM(items.get(), i);
    found.push_back(item == Py_None ? Tensor() : THPVariable_Unpack(item));
  }
  return found;
}

// ---- autograd

enum Keep { NOTHING, BITS, RESIDUAL };  // what the activation's gradient needs if a residual was added

static bool is_unseen();

static c10::DispatchKeySet keys_of(const c10::Device& device) {
  return at::empty({0}, at::TensorOptions().device(device)).key_set();
}

// Returns whether all tensors have the dispatch keys of an ordinary dense tensor on this type of device. For example,
// sparse, quantized and traced tensors have other keys.
static bool are_plain(const c10::Device& device, std::initializer_list<const Tensor*> tensors) {
  static const auto cpu = keys_of(c10::Device(c10::DeviceType::CPU));
  auto expected = cpu;
  if (device.is_cuda()) {
    static const auto cuda = keys_of(device);
    expected = cuda;
  }
  for (const auto* t : tensors)
    if (t->defined() && t->key_set() != expected) return false;
  return true;
}

struct Fused : torch::autograd::Function<Fused> {
  // Lets compiled autograd trace backward(). During tracing, are_plain() is false, so backward() calls Python.
  static constexpr bool is_traceable = true;

  static Tensor forward(
      AutogradContext* ctx, const Tensor& x, const Optional& gamma, const Optional& beta, const Optional& residual,
      const Call& call, int64_t keep, bool& done) {
    auto found = ::forward(call);
    done = found.has_value();
    if (!done) return at::empty({0}, x.options().requires_grad(false));
    const auto& [y, stats, bits] = *found;
    const int64_t type = residual ? static_cast<int64_t>(residual->scalar_type()) : -1;
    std::vector<int64_t> numbers{call.code, keep, residual && residual->requires_grad(), type};
    for (const auto strides : {x.strides(), y.strides()}) numbers.insert(numbers.end(), strides.begin(), strides.end());
    ctx->saved_data["numbers"] = std::move(numbers);
    ctx->saved_data["reals"] = std::vector<double>{call.eps, call.slope};
    ctx->save_for_backward({x, call.gamma, call.beta, keep == RESIDUAL ? call.residual : Tensor(), bits, stats});
    ctx->set_materialize_grads(false);
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto numbers = ctx->saved_data["numbers"].toIntVector();
    const auto reals = ctx->saved_data["reals"].toDoubleVector();
    const auto eps = reals[0], slope = reals[1];
    const auto code = numbers[0], keep = numbers[1];
    const bool wants_residual = numbers[2] != 0;
    const auto residual_dtype =
        numbers[3] < 0 ? std::nullopt : std::optional<at::ScalarType>(static_cast<at::ScalarType>(numbers[3]));
    const auto dims = (numbers.size() - 4) / 2;
    const at::IntArrayRef x_strides(numbers.data() + 4, dims), y_strides(numbers.data() + 4 + dims, dims);
    const auto &dy = grads[0], &x = saved[0], &gamma = saved[1], &beta = saved[2], &residual = saved[3];
    const auto &bits = saved[4], &stats = saved[5];
    if (!dy.defined()) return {Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
    // Without an activation, the residual's gradient is dy itself, so the kernels need not write it.
    const auto written = wants_residual && keep != NOTHING ? residual_dtype : std::nullopt;
    std::optional<Four> found;
    if (!at::GradMode::is_enabled() && is_unseen() && are_plain(stats.device(), {&dy, &x, &residual, &bits, &stats}) &&
        x.strides() == x_strides)
      found = ::backward({dy, x, residual, bits, stats, code, slope, written});
    if (!found) {
      auto d = call_python(
          python_backward, dy, x, gamma, beta, residual, bits, stats, eps, code, slope, residual_dtype, wants_residual,
          x_strides, y_strides);
      return {d[0], d[1], d[2], d[3], Tensor(), Tensor(), Tensor()};
    }
    auto [dx, dgamma, dbeta, dresidual] = *found;
    if (gamma.defined() && gamma.scalar_type() != at::kFloat) dgamma = dgamma.to(gamma.scalar_type());
    if (beta.defined() && beta.scalar_type() != at::kFloat) dbeta = dbeta.to(beta.scalar_type());
    if (wants_residual && !written) dresidual = dy.to(*residual_dtype);
    return {
        dx, gamma.defined() ? dgamma : Tensor(), beta.defined() ? dbeta : Tensor(), dresidual, Tensor(), Tensor(), Tensor()};
  }
};

static Optional optional(const Tensor& t) { return t.defined() ? Optional(t) : std::nullopt; }

static bool requires_grad(const Tensor& t) { return t.defined() && t.requires_grad(); }

// Returns true if no transform, tracer or mode intercepts torch operations. Autograd and autocast may be active.
static bool is_unseen() {
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  return (included - c10::default_included_set - c10::autocast_dispatch_keyset).empty() &&
      at::impl::PythonTorchFunctionTLS::stack_len() == 0;
}

static bool has_autograd() {
  return !c10::impl::tls_local_dispatch_key_set().excluded_.has_any(c10::autograd_dispatch_keyset);
}

// Reads a torch.Tensor, an nn.Parameter or None. Returns false for all other types, even other subclasses of
// torch.Tensor. Also returns false for tensors with a forward-mode gradient.
static bool read(PyObject* given, Tensor& t) {
  if (given == Py_None) return true;
  if (reinterpret_cast<PyObject*>(Py_TYPE(given)) != THPVariableClass &&
      reinterpret_cast<PyObject*>(Py_TYPE(given)) != parameter_class)
    return false;
  t = THPVariable_Unpack(given);
  return !t._fw_grad(0).defined();
}

// train_(x, gamma, beta, residual, running mean, running variance, batches, skipped, momentum, eps, code, keep, slope)
// returns y, or None if Python has to handle the call.
static PyObject* train_(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Tensor t[8];
  TORCH_CHECK(count == 13, "train_ takes 13 arguments");
  if (!is_unseen() || !has_autograd()) Py_RETURN_NONE;
  for (int k = 0; k < 8; ++k)
    if (!read(args[k], t[k])) Py_RETURN_NONE;
  const auto& x = t[0];
  if (!x.defined() || !are_plain(x.device(), {&t[0], &t[1], &t[2], &t[3], &t[4], &t[5], &t[6], &t[7]})) Py_RETURN_NONE;
  if (torch::autograd::get_current_graph_task_id() != -1)
    // This call recomputes a forward pass inside a backward pass. Do not update the running averages a second time.
    for (int k = 4; k < 8; ++k) t[k] = Tensor();
  const auto momentum = args[8] == Py_None ? std::nullopt : std::optional<double>(PyFloat_AsDouble(args[8]));
  const auto eps = PyFloat_AsDouble(args[9]), slope = PyFloat_AsDouble(args[12]);
  const auto code = PyLong_AsLongLong(args[10]);
  if (PyErr_Occurred()) throw python_error();
  const bool differentiable =
      at::GradMode::is_enabled() && (requires_grad(x) || requires_grad(t[1]) || requires_grad(t[2]) || requires_grad(t[3]));
  const auto keep = t[3].defined() ? PyLong_AsLongLong(args[11]) : NOTHING;
  const Call call{x, t[1], t[2], t[3], t[4], t[5], t[6], t[7], momentum, eps, code, slope, differentiable && keep == BITS};
  Tensor y;
  {
    const NoGil others_may_run;
    if (differentiable) {
      bool done = false;
      y = Fused::apply(x, optional(t[1]), optional(t[2]), optional(t[3]), call, keep, done);
      if (!done) y = Tensor();
    } else if (auto found = forward(call)) {
      y = std::get<0>(*found);
    }
  }
  if (!y.defined()) Py_RETURN_NONE;
  return THPVariable_Wrap(y);
  END_HANDLE_TH_ERRORS
}

// ---- operators for compiled graphs

static Tensor whole(const Tensor& t, const Tensor& like) { return t.defined() ? t : empty({0}, like, at::kByte); }

static int64_t code_of(std::string_view name);

static Triple fused_kernel(
    PyObject* otherwise, const Tensor& x, const Optional& gamma, const Optional& beta, const Optional& residual,
    const Tensor& mean, const Tensor& var, const Tensor& batches, const Tensor& skipped, std::optional<double> momentum,
    double eps, std::string_view activation, double slope, bool keep_bits) {
  const auto g = gamma.value_or(Tensor()), b = beta.value_or(Tensor()), r = residual.value_or(Tensor());
  const bool again = torch::autograd::get_current_graph_task_id() != -1;
  const Tensor none;
  const Call call{
      x, g, b, r, again ? none : mean, again ? none : var, again ? none : batches, again ? none : skipped,
      momentum, eps, code_of(activation), slope, keep_bits};
  if (auto found = forward(call))
    return {std::get<0>(*found), std::get<1>(*found), whole(std::get<2>(*found), x)};
  const auto d = mean.defined()
      ? call_python(otherwise, x, g, b, r, mean, var, batches, skipped, momentum, eps, activation, slope, keep_bits)
      : call_python(otherwise, x, g, b, r, eps, activation, slope, keep_bits);
  return {d[0], d[1], d[2]};
}

// Returns whether a call needs neither tracing nor autograd.
static bool is_final(const Tensor& x, const Optional& gamma, const Optional& beta, const Optional& residual) {
  if (!is_unseen() || x.key_set().has(c10::DispatchKey::Python)) return false;
  if (!at::GradMode::is_enabled()) return true;
  return !requires_grad(x) && !requires_grad(gamma.value_or(Tensor())) && !requires_grad(beta.value_or(Tensor())) &&
      !requires_grad(residual.value_or(Tensor()));
}

// If AUTOGRAD, the functions `fused` and `fused_` are the operators' implementations for the AutogradCUDA dispatch key.
// They call Python if a call needs tracing or a gradient. When a compiled graph runs, its calls need neither, because
// the graph contains its own backward pass.
template <bool AUTOGRAD>
static Triple fused(
    const Tensor& x, const Optional& gamma, const Optional& beta, const Optional& residual, double eps,
    std::string_view activation, double slope, bool keep_bits) {
  if (AUTOGRAD && !is_final(x, gamma, beta, residual)) {
    const auto d = call_python(python_differentiable, x, gamma, beta, residual, eps, activation, slope, keep_bits);
    return {d[0], d[1], d[2]};
  }
  const Tensor none;
  return fused_kernel(
      python_fused, x, gamma, beta, residual, none, none, none, none, std::nullopt, eps, activation, slope, keep_bits);
}

template <bool AUTOGRAD>
static Triple fused_(
    const Tensor& x, const Optional& gamma, const Optional& beta, const Optional& residual, Tensor& mean, Tensor& var,
    Tensor& batches, Tensor& skipped, std::optional<double> momentum, double eps, std::string_view activation,
    double slope, bool keep_bits) {
  if (AUTOGRAD && !is_final(x, gamma, beta, residual)) {
    const auto d = call_python(
        python_differentiable_, x, gamma, beta, residual, mean, var, batches, skipped, momentum, eps, activation, slope,
        keep_bits);
    return {d[0], d[1], d[2]};
  }
  return fused_kernel(
      python_fused_, x, gamma, beta, residual, mean, var, batches, skipped, momentum, eps, activation, slope, keep_bits);
}

static Four fused_backward(
    const Tensor& dy, const Tensor& x, const Optional& residual, const Optional& bits, const Tensor& stats,
    std::string_view activation, double slope, std::optional<at::ScalarType> residual_dtype) {
  const auto r = residual.value_or(Tensor()), b = bits.value_or(Tensor());
  if (auto found = backward({dy, x, r, b, stats, code_of(activation), slope, residual_dtype})) {
    auto& [dx, dgamma, dbeta, dresidual] = *found;
    return {dx, dgamma, dbeta, whole(dresidual, x)};
  }
  const auto d = call_python(python_fused_backward, dy, x, r, b, stats, activation, slope, residual_dtype);
  return {d[0], d[1], d[2], d[3]};
}

static PyObject* register_operators(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  static torch::Library cuda(torch::Library::IMPL, "batchnorm", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  static torch::Library autograd(torch::Library::IMPL, "batchnorm", c10::DispatchKey::AutogradCUDA, __FILE__, __LINE__);
  cuda.impl("fused", &fused<false>), cuda.impl("fused_", &fused_<false>), cuda.impl("fused_backward", &fused_backward);
  autograd.impl("fused", &fused<true>), autograd.impl("fused_", &fused_<true>);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// ---- setup from Python

static std::unordered_map<std::string, int64_t> codes;

static int64_t code_of(std::string_view name) {
  const auto found = codes.find(std::string(name));
  return found == codes.end() ? -1 : found->second;
}

static std::vector<int64_t> integers(PyObject* list) {
  THPObjectPtr items(PySequence_Tuple(list));
  if (!items) throw python_error();
  std::vector<int64_t> found;
  for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(items.get()); ++k)
    found.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(items.get(), k)));
  if (PyErr_Occurred()) throw python_error();
  return found;
}

// Reads a tuple (strides, bits, floats, words, launches). Each of the launches is a tuple (function, programs, threads,
// shared, cooperative, image, offsets, writes), and each of the writes is a tuple (offset, kind, slot).
static Pass read_pass(PyObject* description) {
  PyObject *strides, *bits, *launches;
  long long floats, words;
  if (!PyArg_ParseTuple(description, "OOLLO!", &strides, &bits, &floats, &words, &PyList_Type, &launches))
    throw python_error();
  Pass pass{integers(strides), integers(bits), floats, words, {}};
  for (Py_ssize_t k = 0; k < PyList_GET_SIZE(launches); ++k) {
    unsigned long long function;
    unsigned programs, threads, shared;
    int cooperative;
    const char* image;
    Py_ssize_t bytes;
    PyObject *offsets, *writes;
    if (!PyArg_ParseTuple(
            PyList_GET_ITEM(launches, k), "KIIIpy#OO!", &function, &programs, &threads, &shared, &cooperative, &image,
            &bytes, &offsets, &PyList_Type, &writes))
      throw python_error();
    Launch launch{reinterpret_cast<void*>(function), programs, threads, shared, cooperative != 0, {image, size_t(bytes)}, {}, {}};
    for (const auto offset : integers(offsets)) launch.offsets.push_back(static_cast<int>(offset));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(writes); ++i) {
      int offset, slot, kind;
      if (!PyArg_ParseTuple(PyList_GET_ITEM(writes, i), "iCi", &offset, &kind, &slot)) throw python_error();
      launch.writes.push_back({offset, slot, static_cast<char>(kind)});
    }
    TORCH_CHECK(launch.image.size() <= Launch::BYTES && launch.offsets.size() <= Launch::ARGUMENTS, "too many arguments");
    pass.launches.push_back(std::move(launch));
  }
  return pass;
}

static void remember(const Key& key, Pass pass) {
  std::lock_guard<std::mutex> lock(mutex);
  passes.try_emplace(key, std::move(pass));
}

static Tensor tensor(PyObject* given) { return given == Py_None ? Tensor() : THPVariable_Unpack(given); }

static PyObject* add_forward(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *x, *gamma, *beta, *residual, *pass;
  int moves, cumulative, keep_bits;
  long long code;
  if (!PyArg_ParseTuple(args, "OOOOppLpO", &x, &gamma, &beta, &residual, &moves, &cumulative, &code, &keep_bits, &pass))
    return nullptr;
  const auto tx = tensor(x), tg = tensor(gamma), tb = tensor(beta), tr = tensor(residual);
  const auto momentum = cumulative ? std::nullopt : std::optional<double>(0.0);
  const Tensor none;
  const auto& mean = moves ? tx : none;  // any tensor will do: the key depends only on whether `mean` is defined
  if (tx.dim() <= MAX_DIMS)
    remember(Call{tx, tg, tb, tr, mean, none, none, none, momentum, 0, code, 0, keep_bits != 0}.key(), read_pass(pass));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

static PyObject* add_backward(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *dy, *x, *residual, *bits, *dresidual, *pass;
  long long code;
  if (!PyArg_ParseTuple(args, "OOOOOLO", &dy, &x, &residual, &bits, &dresidual, &code, &pass)) return nullptr;
  const auto tdy = tensor(dy), tx = tensor(x), tr = tensor(residual), tb = tensor(bits), td = tensor(dresidual);
  const auto type = td.defined() ? std::optional<at::ScalarType>(td.scalar_type()) : std::nullopt;
  const Tensor none;
  if (tx.dim() <= MAX_DIMS) remember(Gradient{tdy, tx, tr, tb, none, code, 0, type}.key(), read_pass(pass));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Sets the workspace of a stream. The caller must keep the memory alive.
static PyObject* set_room(PyObject*, PyObject* args) {
  long long device, float_count, word_count;
  unsigned long long stream, floats, words;
  if (!PyArg_ParseTuple(args, "LKKLKL", &device, &stream, &floats, &float_count, &words, &word_count)) return nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  rooms[device][reinterpret_cast<void*>(stream)] = {
      reinterpret_cast<void*>(floats), reinterpret_cast<void*>(words), float_count, word_count};
  Py_RETURN_NONE;
}

static PyObject* configure(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  unsigned long long kernel, cooperative, capturing, stream;
  PyObject* names;
  PyObject** functions[] = {
      &parameter_class, &python_backward, &python_fused, &python_fused_, &python_fused_backward, &python_differentiable,
      &python_differentiable_};
  PyObject* given[7];
  if (!PyArg_ParseTuple(
          args, "KKKKO!OOOOOOO", &kernel, &cooperative, &capturing, &stream, &PyTuple_Type, &names, &given[0], &given[1],
          &given[2], &given[3], &given[4], &given[5], &given[6]))
    return nullptr;
  launch_kernel = reinterpret_cast<decltype(launch_kernel)>(kernel);
  launch_cooperative = reinterpret_cast<decltype(launch_cooperative)>(cooperative);
  stream_is_capturing = reinterpret_cast<decltype(stream_is_capturing)>(capturing);
  current_stream = reinterpret_cast<decltype(current_stream)>(stream);
  for (int k = 0; k < 7; ++k) *functions[k] = Py_NewRef(given[k]);
  for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(names); ++k) codes[PyUnicode_AsUTF8(PyTuple_GET_ITEM(names, k))] = k;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

static PyObject* counts(PyObject*, PyObject*) {
  return Py_BuildValue("LL", (long long)forward_passes.load(), (long long)backward_passes.load());
}

static PyMethodDef methods[] = {
    {"train_", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(train_)), METH_FASTCALL, nullptr},
    {"add_forward", add_forward, METH_VARARGS, nullptr},
    {"add_backward", add_backward, METH_VARARGS, nullptr},
    {"set_room", set_room, METH_VARARGS, nullptr},
    {"configure", configure, METH_VARARGS, nullptr},
    {"counts", counts, METH_NOARGS, nullptr},
    {"register_operators", register_operators, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "batchnorm_autograd", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_batchnorm_autograd() { return PyModule_Create(&definition); }
