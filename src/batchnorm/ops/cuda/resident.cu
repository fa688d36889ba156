// Batch normalization in one launch. The kernel keeps as much of x (and of dy in the backward pass) as possible on
// chip, that is, in shared memory. When it computes the outputs, it does not read these values from global memory
// again. All programs (thread blocks) run at the same time, one or two per multiprocessor. The channels are divided
// into slices, and the values of a slice into parts. A program processes one part of one slice, then the same part of
// its next slice, if any. The programs of a slice meet at a barrier: each program adds up its own part, waits for the
// other programs, and then computes y or dx from the sums of all parts.
//
// Values are read in vectors of 16 bytes. Each thread copies its own vectors into shared memory, so no thread waits for
// another thread's vectors. Vectors that do not fit into shared memory are read twice, the second time from the L2
// cache if they are still in it. For the formulas, the rows of the array `stats`, the barriers and the update of the
// running averages, see forward.py, backward.py, barrier.py and running.py in triton/.
//
// The kernel has three variants, which divide the values of a slice into units in different ways:
// - Channels last: a row has the values of all channels at one location of one example. A unit is the piece of a row
//   that lies in a slice, up to SV vectors.
// - Channels first, if a channel's values in one example fill whole vectors: a slice is one channel, and a unit is one
//   vector of the channel.
// - WOVEN: channels first, if a channel's values in one example do not fill whole vectors, for example 7 x 7 values. A
//   slice is a group of channels whose values in one example together fill SV whole vectors. A row, which is also a
//   unit, is the slice's values in one example. A vector may hold values of two channels.
//
// These macros are defined when the file is compiled:
// - FORWARD or BACKWARD: which pass to compile
// - KIND: 0 bfloat16, 1 float16, 2 float32
// - LAST: whether the layout is channels last
// - PLANE: in the WOVEN variant, the number of values of a channel in one example; 0 in the other variants
// - ACT: the activation's code; resident.py also defines one macro per code: IDENTITY, RELU, ...
// - RESIDUAL: in the forward pass, whether a residual is added; in the backward pass, whether sign bits (see
//   sign_bits.py) are read or the residual's gradient is written
// - ADDED: whether the forward pass keeps the whole residual on chip
// - THREADS: threads per program
// - SV: vectors per unit; not used in the second variant
// - K: maximum number of vectors of each tensor that a thread keeps on chip
// - EACH: programs per multiprocessor
// - LAYERS: the number of layers in the launch; their tensors are channels last and all have the same number of rows.
//   If LAYERS is 0, there is a single layer, whose tensors are passed as separate arguments.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define BATCH 4
#define BATCHES ((K + BATCH - 1) / BATCH)
// A thread copies its vectors to shared memory in batches of BATCH vectors. In a program's first slice, up to AHEAD
// more batches are being copied while the thread adds up one batch. If the thread started to copy all batches at once,
// they would arrive in no particular order, which would delay the first sums. In later slices, the copies start
// earlier, while the outputs of the previous slice are computed.
#ifdef FORWARD
#define AHEAD (BATCHES < 2 ? BATCHES : 2)
#else
#define AHEAD 1
#endif
#define WARPS (THREADS / 32)
#if KIND == 2
#define V 4  // values per vector
#else
#define V 8
#endif
#define WOVEN (PLANE > 0)
#define ROWS (LAST || WOVEN)  // whether a unit has SV vectors; if not, a unit is one vector
#define BLOCK (ROWS ? THREADS / SV : THREADS)  // units that a program's threads process together in one step
#if LAST
#define W (SV * V)  // channels per slice; the last slice may have fewer
#define EACH_UNIT 1  // values of each channel in a unit
#elif WOVEN
#define W (SV * V / PLANE)
#define EACH_UNIT PLANE
#else
#define W 1
#define EACH_UNIT V
#endif
#define UNROLL 4

struct alignas(16) Vec {
    u32 w[4];
};

// ---- machine instructions ----
// All PTX is in this section. tests/emulated.hpp implements the functions of this section in C++, so that the rest of
// this file can run on a CPU.

#ifdef EMULATED
#include EMULATED
#else

extern __shared__ __align__(16) char memory[];

__device__ __forceinline__ u32 address(const char* shared) { return (u32)__cvta_generic_to_shared(shared); }

// The next three functions convert between two floats and a word of two 16-bit numbers; `a` is in the lower half.
__device__ __forceinline__ void from_halves(u32 w, float& a, float& b) {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(a), "=f"(b) : "r"(w));
}

__device__ __forceinline__ u32 to_halves(float a, float b) {
    u32 w;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(b), "f"(a));
    return w;
}

__device__ __forceinline__ u32 to_bfloats(float a, float b) {
    u32 w;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(b), "f"(a));
    return w;
}

// exponential() and quotient() use the same instructions as Triton, so that sigmoid, tanh and silu have the same
// results as in triton/tile.py, bit for bit.
__device__ __forceinline__ float exponential(float v) {
    float e;
    asm("ex2.approx.f32 %0, %1;" : "=f"(e) : "f"(v * 1.4426950408889634f));
    return e;
}

__device__ __forceinline__ float quotient(float a, float b) {
    float q;
    asm("div.full.f32 %0, %1, %2;" : "=f"(q) : "f"(a), "f"(b));
    return q;
}

__device__ __forceinline__ u64 evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// copy_async() starts to copy a vector to a slot, which is 16 bytes of shared memory. commit() puts the thread's copies
// since its last commit() into a group. arrived<n>() waits until at most n of the thread's groups are pending.
__device__ __forceinline__ void copy_async(u32 slot, const char* from, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;"
                 ::"r"(slot), "l"(from), "l"(policy) : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void arrived() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ Vec load(const char* from) {
    Vec v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "l"(from));
    return v;
}

__device__ __forceinline__ Vec load_slot(u32 slot) {
    Vec v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "r"(slot) : "memory");
    return v;
}

__device__ __forceinline__ void store(char* to, const Vec& v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"l"(to), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]) : "memory");
}

// Like store(), but tells the cache that the vector will not be read soon and may be evicted early.
__device__ __forceinline__ void store_through(char* to, const Vec& v) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"l"(to), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]) : "memory");
}

__device__ __forceinline__ void fetch(const char* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

__device__ __forceinline__ u32 peek(const u32* word) {
    u32 now;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
    return now;
}

__device__ __forceinline__ u32 glance(const u32* word) {
    u32 now;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
    return now;
}

__device__ __forceinline__ void arrive(u32* word, u32 step) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(step) : "memory");
}

__device__ __forceinline__ u32 add_release(u32* word, u32 step) {
    u32 before;
    asm volatile("atom.release.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(step) : "memory");
    return before;
}

__device__ __forceinline__ void acquire() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

#endif

// ---- numbers ----

__device__ __forceinline__ void widen(const Vec& v, float (&f)[V]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#if KIND == 0
        f[2 * k] = __uint_as_float(v.w[k] << 16);
        f[2 * k + 1] = __uint_as_float(v.w[k] & 0xffff0000u);
#elif KIND == 1
        from_halves(v.w[k], f[2 * k], f[2 * k + 1]);
#else
        f[k] = __uint_as_float(v.w[k]);
#endif
    }
}

__device__ __forceinline__ Vec narrow(const float (&f)[V]) {
    Vec v;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#if KIND == 0
        v.w[k] = to_bfloats(f[2 * k], f[2 * k + 1]);
#elif KIND == 1
        v.w[k] = to_halves(f[2 * k], f[2 * k + 1]);
#else
        v.w[k] = __float_as_uint(f[k]);
#endif
    }
    return v;
}

__device__ __forceinline__ bool is_number(float v) { return fabsf(v) < __int_as_float(0x7f800000); }

// ---- tensors in memory ----

struct Shape {
    int C, units, slices, parts;  // `units` is the number of units of a slice
    // Strides in bytes: *_stride is the stride of a row (channels last) or of an example (channels first). *_plane is
    // the stride of a channel (channels first only). dx, the residual and its gradient have the strides of y. dy's
    // channels have the stride y_plane.
    i64 x_stride, x_plane, y_stride, y_plane, dy_stride;
    int width;  // the number of vectors of a channel in one example; 0 if ROWS
    u32 magic, shift;  // constants that turn a division by `width` into a multiplication: see magic_of in layout.py
    int passing;  // whether x (of all layers together) is too large to stay in the L2 cache
};

// The arguments of one layer. Slices are numbered across all layers; `shape.slices` is the number of this layer's
// slices.
struct Layer {
#ifdef FORWARD
    const char* x;
    char* y;
    const float *gamma, *beta;
    float *mean, *var;
    i64 *batches, *skipped;
    float *stats, *partial;
#else
    const char* x;
    char* dx;
    const char* dy;
    const float* stats;
    float *dgamma, *dbeta, *partial;
#endif
    u32* words;
    Shape shape;
};

struct Layers {
    Layer at[LAYERS ? LAYERS : 1];

    __device__ __forceinline__ int slices() const {
        int n = 0;
#pragma unroll
        for (int k = 0; k < (LAYERS ? LAYERS : 1); ++k) n += at[k].shape.slices;
        return n;
    }

    // Returns the index of the layer that a slice belongs to. Before the call, `slice` is the slice's index among the
    // slices of all layers; find() changes it to the slice's index within its layer.
    __device__ __forceinline__ int find(int& slice) const {
        int found = 0, first = 0, end = 0;
#pragma unroll
        for (int k = 0; k + 1 < LAYERS; ++k) {
            end += at[k].shape.slices;
            if (slice >= end) {
                found = k + 1;
                first = end;
            }
        }
        slice -= first;
        return found;
    }
};

// Stores a vector of an output. If x is too large to stay in the L2 cache, the vector is marked for early eviction, so
// that outputs do not evict inputs, which may be read again.
__device__ __forceinline__ void put(char* to, const Vec& v, const Shape& s) {
    if (s.passing)
        store_through(to, v);
    else
        store(to, v);
}

// The n vectors of a slice that one thread processes. offset() returns the byte offset of the i-th of these vectors.
// The units of a slice are divided into runs of BLOCK units. Run k belongs to part k % parts, so that all programs
// together read the tensor from start to end. If ROWS, a unit has several vectors, and a thread processes only the vector
// `column` of each of its units.
struct Walk {
    int slice, first, step, n, column;

    __device__ __forceinline__ Walk(const Shape& s, int slice, int part) : slice(slice), step(s.parts * BLOCK) {
        column = ROWS ? threadIdx.x % SV : 0;
        first = part * BLOCK + (ROWS ? threadIdx.x / SV : threadIdx.x);
        n = works(s) && first < s.units ? (s.units - first - 1) / step + 1 : 0;
    }

    // Returns false if no unit of the slice has a vector for this thread. With channels last, this happens if the units
    // of the last slice have fewer than SV vectors. If WOVEN and SV does not divide THREADS, it happens to the last
    // threads.
    __device__ __forceinline__ bool works(const Shape& s) const {
        return LAST ? (slice * SV + column) * V < s.C : !WOVEN || threadIdx.x < BLOCK * SV;
    }

    // Returns the channel of a vector's k-th value, counted from the slice's first channel.
    __device__ __forceinline__ int channel(int k) const {
        return LAST ? column * V + k : WOVEN ? (column * V + k) / (WOVEN ? PLANE : 1) : 0;
    }

    __device__ __forceinline__ i64 offset(const Shape& s, int i, i64 stride, i64 plane) const {
#if ROWS
        return (i64)(first + i * step) * stride + (slice * SV + column) * 16;
#else
        u32 u = first + i * step;
        u32 example = __umulhi(u, s.magic) >> s.shift;
        return (i64)example * stride + slice * plane + (i64)(u - example * s.width) * 16;
#endif
    }
    __device__ __forceinline__ i64 of_x(const Shape& s, int i) const { return offset(s, i, s.x_stride, s.x_plane); }
    __device__ __forceinline__ i64 of_y(const Shape& s, int i) const { return offset(s, i, s.y_stride, s.y_plane); }

    __device__ __forceinline__ i64 of_dy(const Shape& s, int i) const { return offset(s, i, s.dy_stride, s.y_plane); }

    // Returns the offset of the byte that holds the i-th vector's sign bits (see sign_bits.py). The bits are stored row
    // by row, with C bits per row (channels last), or channel by channel, with units * V bits per channel (channels
    // first). Each row or channel is padded to whole bytes. If WOVEN, the bits are in the order of the values of y.
    __device__ __forceinline__ i64 of_bits(const Shape& s, int i) const {
#if LAST
        return (i64)(first + i * step) * ((s.C + 7) / 8) + (slice * SV + column) * V / 8;
#elif WOVEN
        return of_y(s, i) >> (V == 8 ? 4 : 5);
#else
        return (i64)slice * (((i64)s.units * V + 7) / 8) + (i64)(first + i * step) * V / 8;
#endif
    }
};

// Stores a vector's sign bits. A float32 vector has only four sign bits, so two neighboring threads share a byte. Both
// threads always have a vector, because resident.py makes sure that each row or channel has an even number of vectors.
__device__ __forceinline__ void store_bits(unsigned char* to, u32 bits) {
#if V == 8
    *to = bits;
#else
    u32 other = __shfl_xor_sync(3u << (threadIdx.x % 32 & ~1), bits, 1);
    if (threadIdx.x % 2 == 0) *to = bits | other << 4;
#endif
}

__device__ __forceinline__ u32 load_bits(const unsigned char* from) {
#if V == 8
    return *from;
#else
    return *from >> (threadIdx.x % 2 * 4);
#endif
}

// ---- barriers: see barrier.py ----

// In thread 0, returns the highest bit of a barrier's word; in other threads, returns 0. The bit does not change before
// this program arrives at the barrier, so the program may read the bit early.
__device__ __forceinline__ u32 side_of(const u32* word) { return threadIdx.x == 0 ? glance(word) & 0x80000000u : 0; }

__device__ __forceinline__ void meet(u32* word, u32 side, int part, int parts) {
    __syncthreads();
    if (threadIdx.x == 0) {
        arrive(word, part == 0 ? 0x80000000u - (parts - 1) : 1);
        while ((peek(word) & 0x80000000u) == side) {
        }
    }
    __syncthreads();
}

// ---- sums ----

__device__ __forceinline__ void put_four(float* to, float a, float b, float c, float d) {
    *(float4*)to = make_float4(a, b, c, d);
}

__device__ __forceinline__ void put_values(float* to, const float (&f)[V]) {
#pragma unroll
    for (int k = 0; k < V; k += 4) put_four(to + k, f[k], f[k + 1], f[k + 2], f[k + 3]);
}

// The number of floats in `scratch`, the shared memory through which the threads exchange sums in the functions below.
#define SCRATCH (LAST ? 2 * (WARPS * W > THREADS ? WARPS * W : THREADS) : WOVEN ? 4 * THREADS : 2 * WARPS)

// For each channel of the slice, adds up s1 and s2 over all threads, in a fixed order. In each thread i < W, a and b
// become the sums of s1 and s2 for channel i of the slice.
__device__ __forceinline__ void totals(float (&s1)[V], float (&s2)[V], const Walk& walk, float* scratch, float& a, float& b) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#if WOVEN
    // A vector may hold values of two channels. `mine` has the two sums of the first channel, then the two sums of the
    // second channel.
    float mine[4] = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < V; ++k) {
        int other = walk.channel(k) != walk.channel(0) ? 2 : 0;
        mine[0] += other ? 0 : s1[k];
        mine[1] += other ? 0 : s2[k];
        mine[2] += other ? s1[k] : 0;
        mine[3] += other ? s2[k] : 0;
    }
    put_four(scratch + threadIdx.x * 4, mine[0], mine[1], mine[2], mine[3]);
    __syncthreads();
    float found[(W + WARPS - 1) / WARPS][2];
#pragma unroll
    for (int turn = 0; turn < (W + WARPS - 1) / WARPS; ++turn) {
        int c = turn * WARPS + warp, from = c * PLANE / V, columns = ((c + 1) * PLANE - 1) / V - from + 1;
        float t1 = 0, t2 = 0;
        for (int i = lane; c < W && i < columns * BLOCK; i += 32) {
            int row = i / columns, column = from + i - row * columns;
            const float* at = scratch + (row * SV + column) * 4 + (column * V / PLANE == c ? 0 : 2);
            t1 += at[0];
            t2 += at[1];
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            t1 += __shfl_xor_sync(~0u, t1, step);
            t2 += __shfl_xor_sync(~0u, t2, step);
        }
        found[turn][0] = t1;
        found[turn][1] = t2;
    }
    __syncthreads();
#pragma unroll
    for (int turn = 0; turn < (W + WARPS - 1) / WARPS; ++turn)
        if (lane == 0 && turn * WARPS + warp < W) {
            scratch[(turn * WARPS + warp) * 2] = found[turn][0];
            scratch[(turn * WARPS + warp) * 2 + 1] = found[turn][1];
        }
    __syncthreads();
    a = threadIdx.x < W ? scratch[threadIdx.x * 2] : 0;
    b = threadIdx.x < W ? scratch[threadIdx.x * 2 + 1] : 0;
    __syncthreads();
#elif LAST
#pragma unroll
    for (int step = 16; step >= SV; step /= 2)
#pragma unroll
        for (int k = 0; k < V; ++k) {
            s1[k] += __shfl_xor_sync(~0u, s1[k], step);
            s2[k] += __shfl_xor_sync(~0u, s2[k], step);
        }
    if (lane < SV) {
        put_values(scratch + (warp * 2 + 0) * W + lane * V, s1);
        put_values(scratch + (warp * 2 + 1) * W + lane * V, s2);
    }
    __syncthreads();
    a = b = 0;
    if (threadIdx.x < W) {
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            a += scratch[(w * 2 + 0) * W + threadIdx.x];
            b += scratch[(w * 2 + 1) * W + threadIdx.x];
        }
    }
#else
    float t1 = 0, t2 = 0;
#pragma unroll
    for (int k = 0; k < V; ++k) {
        t1 += s1[k];
        t2 += s2[k];
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        t1 += __shfl_xor_sync(~0u, t1, step);
        t2 += __shfl_xor_sync(~0u, t2, step);
    }
    if (lane == 0) {
        scratch[warp * 2] = t1;
        scratch[warp * 2 + 1] = t2;
    }
    __syncthreads();
    a = b = 0;
    if (threadIdx.x == 0) {
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            a += scratch[w * 2];
            b += scratch[w * 2 + 1];
        }
    }
#endif
}

// Adds up the two sums of each channel over all parts, in a fixed order. In each thread i < W, a and b become the
// totals for channel i of the slice. TEAMS is the number of threads that work on one channel.
#define TEAMS (LAST ? THREADS / W : WOVEN ? 4 : 32)
__device__ __forceinline__ void add_parts(const float2* partial, const Shape& s, int slice, float* scratch, float& a, float& b) {
    int c = slice * W + threadIdx.x % W, team = threadIdx.x / W;
    a = b = 0;
    if (c < s.C && team < TEAMS) {
#pragma unroll 16
        for (int p = team; p < s.parts; p += TEAMS) {
            float2 v = __ldcg(partial + (i64)p * s.C + c);
            a += v.x;
            b += v.y;
        }
    }
#if ROWS
    __syncthreads();
    if (team < TEAMS) {
        scratch[threadIdx.x * 2] = a;
        scratch[threadIdx.x * 2 + 1] = b;
    }
    __syncthreads();
    if (threadIdx.x < W) {
        a = b = 0;
#pragma unroll
        for (int team = 0; team < TEAMS; ++team) {
            a += scratch[(team * W + threadIdx.x) * 2];
            b += scratch[(team * W + threadIdx.x) * 2 + 1];
        }
    }
#else
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        a += __shfl_xor_sync(~0u, a, step);
        b += __shfl_xor_sync(~0u, b, step);
    }
#endif
}

__device__ __forceinline__ float sigmoid(float z) { return quotient(1, 1 + exponential(-z)); }

__device__ __forceinline__ float tanh_of(float z) { return fmaf(2, sigmoid(2 * z), -1); }

__device__ __forceinline__ float activate(float z, float slope) {
#if ACT == RELU
    return z < 0 ? 0 : z;  // NaN stays NaN
#elif ACT == LEAKY_RELU
    return z < 0 ? z * slope : z;
#elif ACT == SIGMOID
    return sigmoid(z);
#elif ACT == TANH
    return tanh_of(z);
#elif ACT == SILU
    return z * sigmoid(z);
#elif ACT == RELU6
    return z < 0 ? 0 : z > 6 ? 6 : z;
#elif ACT == HARDSWISH
    return z * fminf(fmaxf(z + 3, 0), 6) * (1.0f / 6);
#else
    return z;
#endif
}

// Returns whether g'(z) is 1, for activations g whose derivative has only two values. If z is NaN, the result is true
// for relu and relu6, as in torch's CUDA kernels, and false for leaky_relu.
__device__ __forceinline__ bool passes(float z) {
    return ACT == RELU ? !(z <= 0) : ACT == RELU6 ? !(z <= 0 || z >= 6) : z > 0;
}

__device__ __forceinline__ float activate_backward(float dy, float z, float slope) {
#if ACT == RELU || ACT == RELU6
    return passes(z) ? dy : 0;
#elif ACT == LEAKY_RELU
    return passes(z) ? dy : dy * slope;
#elif ACT == SIGMOID
    float s = sigmoid(z);
    return dy * s * (1 - s);
#elif ACT == TANH
    float s = tanh_of(z);
    return dy * (1 - s * s);
#elif ACT == SILU
    float s = sigmoid(z);
    return dy * s * (1 + z * (1 - s));
#elif ACT == HARDSWISH
    return z <= -3 ? 0 : z < 3 ? dy * (z * (1.0f / 3) + 0.5f) : dy;
#else
    return dy;
#endif
}

__device__ __forceinline__ u32 slot_of(int tensor, int i) {
    return address(memory) + ((tensor * K + i) * THREADS + threadIdx.x) * 16;
}

// ---- forward ----

#ifdef FORWARD

struct Running {
    float *mean, *var;
    i64 *batches, *skipped;
    float momentum;
    int cumulative;
};

// Updates a layer's running averages. In each program that processes the first part of a slice, each of the first W
// threads updates one channel. Among all warps that have such threads, the warp that is done last increments `batches`.
// But if the mean or variance of any channel is not finite, this warp instead restores the old averages of all channels
// and increments `skipped`. In the first thread of a warp, go() returns the number of warps that are done, plus 1 << 16
// for each of them that found a mean or variance that is not finite. Only finish() reads this number, so the code
// between go() and finish() does not wait for the atomic operation.
struct Move {
    float old_mean, old_var, factor;

    __device__ __forceinline__ void prepare(const Running& r, int channel) {
        if (!r.mean) return;
        old_mean = r.mean[channel];
        old_var = r.var[channel];
        factor = r.cumulative ? 1.0f / (float)(*r.batches + 1) : r.momentum;
    }

    // Rounds as torch.lerp does: if the factor is 1, the result is exactly `now`.
    __device__ __forceinline__ float lerp(float old, float now) {
        float step = now - old;
        return factor < 0.5f ? old + factor * step : now - (1 - factor) * step;
    }

    // All threads of a warp must call go().
    __device__ __forceinline__ u32 go(const Running& r, u32* done, float* before, int C, int channel, bool here, float mean, float var, float count) {
        bool bad = false;
        if (here) {
            before[channel] = old_mean;
            before[C + channel] = old_var;
            r.mean[channel] = lerp(old_mean, mean);
            r.var[channel] = lerp(old_var, var * (count / (count - 1)));
            bad = !(is_number(mean) && is_number(var));
        }
        u32 step = 1 + (__any_sync(~0u, bad) ? 1u << 16 : 0);
        __syncwarp();
        // Mask out the highest bit, because an earlier launch that used this word as a barrier may have left the bit
        // set.
        return threadIdx.x % 32 == 0 ? (add_release(done, step) & 0x7fffffffu) + step : 0;
    }

    __device__ __forceinline__ void finish(const Running& r, u32* done, const float* before, int C, u32 all, u32 expected) {
        all = __shfl_sync(~0u, all, 0);
        if ((all & 0xffff) != expected) return;
        acquire();
        __syncwarp();
        if (all >> 16)
            for (int c = threadIdx.x % 32; c < C; c += 32) {
                r.mean[c] = __ldcg(before + c);
                r.var[c] = __ldcg(before + C + c);
            }
        if (threadIdx.x % 32 == 0) {
            *done = 0;
            *(all >> 16 ? r.skipped : r.batches) += 1;
        }
    }
};
#define MOVERS ((W + 31) / 32)  // number of warps per program that update running averages

// A value near the channel's mean is subtracted from all values of the channel before they are squared and summed,
// because E[x^2] - E[x]^2 loses all precision if the mean is large compared to the standard deviation. The subtracted
// value is the channel's mean over SAMPLES units that are spread over the slice, or 0 if this mean is not finite. All
// parts of a slice subtract the same value. The first SAMPLES * SV threads (if ROWS) or the first SAMPLES threads
// (otherwise) each read one vector of these units.
#if LAST
#define SAMPLES (2 * WARPS < BLOCK ? 2 * WARPS : BLOCK)
#elif WOVEN
#define SAMPLES BLOCK
#else
#define SAMPLES 32
#endif
__device__ __forceinline__ Vec sample(const char* x, const Shape& s, Walk walk) {
    Vec v = {};
    int k = ROWS ? threadIdx.x / SV : threadIdx.x;
    walk.first = (i64)k * s.units / SAMPLES;
    if (k < SAMPLES && walk.works(s)) v = load(x + walk.of_x(s, 0));
    return v;
}

__device__ __forceinline__ void mean_of_samples(const Vec& v, const Walk& walk, float* scratch, float* mean) {
    float f[V];
    widen(v, f);
#if WOVEN
    float zeros[V] = {}, sum, none;
    totals(f, zeros, walk, scratch, sum, none);
    if (threadIdx.x < W) mean[threadIdx.x] = is_number(sum) ? sum / (SAMPLES * PLANE) : 0;
#elif LAST
    if (threadIdx.x < SAMPLES * SV) put_values(scratch + threadIdx.x * V, f);
    __syncthreads();
    if (threadIdx.x < W) {
        float sum = 0;
#pragma unroll
        for (int k = 0; k < SAMPLES; ++k) sum += scratch[k * W + threadIdx.x];
        mean[threadIdx.x] = is_number(sum) ? sum / SAMPLES : 0;
    }
#else
    if (threadIdx.x < 32) {
        float sum = 0;
#pragma unroll
        for (int k = 0; k < V; ++k) sum += f[k];
#pragma unroll
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (threadIdx.x == 0) mean[0] = is_number(sum) ? sum / (SAMPLES * V) : 0;
    }
#endif
    __syncthreads();
}

#if LAYERS
extern "C" __global__ void __launch_bounds__(THREADS, EACH) forward_layers(
    const __grid_constant__ Layers layers, float momentum, int cumulative, float eps, float slope) {
    const char* residual = 0;
    unsigned char* bits = 0;
#else
extern "C" __global__ void __launch_bounds__(THREADS, EACH) forward(
    const char* x, char* y, const char* residual, unsigned char* bits, const float* gamma, const float* beta,
    float* stats, float* partial, u32* words, Running given, Shape s, float eps, float slope) {
    const Layers layers = {{{x, y, gamma, beta, given.mean, given.var, given.batches, given.skipped, stats, partial, words, s}}};
    const float momentum = given.momentum;
    const int cumulative = given.cumulative;
#endif
    __align__(16) __shared__ float scratch[SCRATCH];
    __shared__ float shared_base[W], shared_scale[W], shared_offset[W];
    const u64 policy = evict_first();
    const int parts = layers.at[0].shape.parts, slices = layers.slices(), groups = gridDim.x / parts;
    // Neighboring programs process the same part of neighboring slices. In a channels-last tensor, they therefore read
    // long contiguous pieces of memory together.
    const int group = blockIdx.x % groups, part = blockIdx.x / groups;

    int all_slice = group, slice = group;
    int layer = layers.find(slice);
    Walk walk(layers.at[layer].shape, slice, part);
    int streamed = max(walk.n - K, 0);
    Vec samples = sample(layers.at[layer].x, layers.at[layer].shape, walk);
    auto copy_batch = [&](const Layer& l, const Walk& walk, int streamed, int j) {
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            int k = j * BATCH + b, i = streamed + k;
            if (k < K && i < walk.n) copy_async(slot_of(0, k), l.x + walk.of_x(l.shape, i), policy);
        }
        commit();
    };
    // Starts to copy the residual to shared memory. Call this after starting the copies of x, so that the statistics do
    // not wait for the residual.
    auto copy_added = [&](const Layer& l, const Walk& walk) {
#pragma unroll 1
        for (int k = 0; k < walk.n; ++k) copy_async(slot_of(1, k), residual + walk.of_y(l.shape, k), policy);
        commit();
    };
#pragma unroll
    for (int j = 0; j < AHEAD; ++j) copy_batch(layers.at[layer], walk, streamed, j);
    for (bool first = true; all_slice < slices; all_slice += groups, first = false) {
        const Layer& l = layers.at[layer];
        const Shape& s = l.shape;
        const char* x = l.x;
        char* y = l.y;
        float *stats = l.stats, *before = l.partial, *partial = l.partial + 2 * s.C;
        u32* words = l.words;
        const Running running = {l.mean, l.var, l.batches, l.skipped, momentum, cumulative};
        const float count = (float)((i64)s.units * EACH_UNIT);
        const int channel = slice * W + threadIdx.x;
        const bool here = threadIdx.x < W && channel < s.C;
        const u32 side = s.parts > 1 ? side_of(words + 2 + slice) : 0;

        // Load the parameters and running averages long before they are used, so that no thread waits for these loads.
        float g = 1, b = 0;
        Move averages = {};
        if (here) {
            if (l.gamma) g = l.gamma[channel];
            if (l.beta) b = l.beta[channel];
            if (part == 0) averages.prepare(running, channel);
        }
        mean_of_samples(samples, walk, scratch, shared_base);
        float near[V], s1[V], s2[V];
#pragma unroll
        for (int k = 0; k < V; ++k) near[k] = shared_base[walk.channel(k)];
#pragma unroll
        for (int k = 0; k < V; ++k) s1[k] = s2[k] = 0;
        auto add = [&](const Vec& v) {
            float f[V];
            widen(v, f);
#pragma unroll
            for (int k = 0; k < V; ++k) {
                float d = f[k] - near[k];
                s1[k] += d;
                s2[k] = fmaf(d, d, s2[k]);
            }
        };
        int i = 0;
        for (; i + UNROLL <= streamed; i += UNROLL) {
            Vec v[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) v[u] = load(x + walk.of_x(s, i + u));
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) add(v[u]);
        }
        for (; i < streamed; ++i) add(load(x + walk.of_x(s, i)));
        const int kept = walk.n - streamed;
#define COUNT_BATCH(J)                                                                   \
    if (J < BATCHES) {                                                                   \
        if (!first) {                                                                    \
            arrived<(BATCHES > J ? BATCHES - 1 - J : 0) + ADDED>();                      \
        } else {                                                                         \
            if (ADDED && J + AHEAD == BATCHES)                                           \
                copy_added(l, walk);                                                     \
            else                                                                         \
                copy_batch(l, walk, streamed, J + AHEAD);                                \
            arrived<AHEAD>();                                                            \
        }                                                                                \
        _Pragma("unroll") for (int b = 0; b < BATCH; ++b) {                              \
            if (J * BATCH + b < kept) add(load_slot(slot_of(0, J * BATCH + b)));         \
        }                                                                                \
    }
        COUNT_BATCH(0) COUNT_BATCH(1) COUNT_BATCH(2) COUNT_BATCH(3)
        COUNT_BATCH(4) COUNT_BATCH(5) COUNT_BATCH(6) COUNT_BATCH(7)
        float sum1, sum2;
        totals(s1, s2, walk, scratch, sum1, sum2);

        float base = here ? shared_base[threadIdx.x] : 0, low = 0, m2 = 0;
        if (RESIDUAL && !ADDED && streamed == 0)
            for (int i = 0; i < walk.n; ++i) fetch(residual + walk.of_y(s, i));
        if (s.parts > 1) {
            if (here) ((float2*)partial)[(i64)part * s.C + channel] = make_float2(sum1, sum2);
            meet(words + 2 + slice, side, part, s.parts);
            add_parts((const float2*)partial, s, slice, scratch, sum1, sum2);
        }
        low = sum1 / count;
        m2 = sum2 - sum1 * low;
        float var = m2 / count, scale = 0, offset = 0, invstd = 0;
        if (here) {
            invstd = 1.0f / sqrtf((var < 0 ? 0 : var) + eps);
            scale = invstd * g;
            offset = fmaf(-low, scale, b);
            shared_base[threadIdx.x] = base;
            shared_scale[threadIdx.x] = scale;
            shared_offset[threadIdx.x] = offset;
        }
        __syncthreads();
        u32 all = 0;
        if (part == 0 && threadIdx.x < MOVERS * 32) {
            if (here) {
                float* at = stats + channel;
                at[0] = base + low;
                at[s.C] = var;
                at[2 * s.C] = count;
                at[3 * s.C] = base;
                at[4 * s.C] = low;
                at[5 * s.C] = scale;
                at[6 * s.C] = offset;
                at[7 * s.C] = invstd;
            }
            if (running.mean && count > 1)
                all = averages.go(running, words + 1, before, s.C, channel, here, base + low, var, count);
        }
        float scales[V], offsets[V];
#pragma unroll
        for (int k = 0; k < V; ++k) {
            int c = walk.channel(k);
            near[k] = shared_base[c];
            scales[k] = shared_scale[c];
            offsets[k] = shared_offset[c];
        }
        slice = all_slice + groups;
        layer = layers.find(slice);
        const Layer& after = layers.at[layer];
        Walk next(after.shape, slice, part);
        if (all_slice + groups >= slices) next.n = 0;
        const int next_streamed = max(next.n - K, 0);
        if (all_slice + groups < slices) samples = sample(after.x, after.shape, next);
        auto normalize = [&](const Vec& v, const Vec& r, int i) {
            float f[V], g[V];
            widen(v, f);
            if (RESIDUAL) widen(r, g);
            u32 above = 0;
#pragma unroll
            for (int k = 0; k < V; ++k) {
                float z = fmaf(f[k] - near[k], scales[k], offsets[k]);
                if (RESIDUAL) z += g[k];
                if (RESIDUAL && passes(z)) above |= 1u << k;
                f[k] = activate(z, slope);
            }
            put(y + walk.of_y(s, i), narrow(f), s);
            if (RESIDUAL && bits) store_bits(bits + walk.of_bits(s, i), above);
        };
        if (ADDED) arrived<0>();
        // Reread the vectors that are not on chip. Start with the vectors that were read last, because these are the
        // most likely to be still in the L2 cache.
        i = streamed;
        for (; i >= UNROLL; i -= UNROLL) {
            Vec v[UNROLL], r[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                v[u] = load(x + walk.of_x(s, i - 1 - u));
                if (RESIDUAL) r[u] = load(residual + walk.of_y(s, i - 1 - u));
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) normalize(v[u], r[u], i - 1 - u);
        }
        for (; i > 0; --i) {
            Vec r;
            if (RESIDUAL) r = load(residual + walk.of_y(s, i - 1));
            normalize(load(x + walk.of_x(s, i - 1)), r, i - 1);
        }
#pragma unroll 1
        for (int j = 0; j < BATCHES; ++j) {
            Vec r[BATCH];
            if (RESIDUAL)
#pragma unroll
                for (int b = 0; b < BATCH; ++b)
                    if (j * BATCH + b < kept)
                        r[b] = ADDED ? load_slot(slot_of(1, j * BATCH + b)) : load(residual + walk.of_y(s, streamed + j * BATCH + b));
#pragma unroll
            for (int b = 0; b < BATCH; ++b)
                if (j * BATCH + b < kept) normalize(load_slot(slot_of(0, j * BATCH + b)), r[b], streamed + j * BATCH + b);
            copy_batch(after, next, next_streamed, j);
        }
        if (ADDED) copy_added(after, next);
        if (running.mean && count > 1 && part == 0 && threadIdx.x < MOVERS * 32)
            averages.finish(running, words + 1, before, s.C, all, s.slices * MOVERS);
        walk = next;
        streamed = next_streamed;
        __syncthreads();
    }
}

#else  // ---- backward ----

// Whether to read the activation's derivative from the saved sign bits. If a residual was added, the derivative cannot
// be recomputed from x alone.
#define SIGNS (RESIDUAL && ACT != IDENTITY)
#if LAYERS
extern "C" __global__ void __launch_bounds__(THREADS, EACH) backward_layers(
    const __grid_constant__ Layers layers, float slope) {
    const unsigned char* bits = 0;
    char* dresidual = 0;
#else
extern "C" __global__ void __launch_bounds__(THREADS, EACH) backward(
    const char* dy, const char* x, const unsigned char* bits, const float* stats, char* dx, char* dresidual,
    float* dgamma, float* dbeta, float* partial, u32* words, Shape s, float slope) {
    const Layers layers = {{{x, dx, dy, stats, dgamma, dbeta, partial, words, s}}};
#endif
    __align__(16) __shared__ float scratch[SCRATCH];
    __shared__ float shared_k2[W], shared_k0[W];
    const u64 policy = evict_first();
    const int parts = layers.at[0].shape.parts, slices = layers.slices(), groups = gridDim.x / parts;
    const int group = blockIdx.x % groups, part = blockIdx.x / groups;

    int all_slice = group, slice = group;
    int layer = layers.find(slice);
    Walk walk(layers.at[layer].shape, slice, part);
    int streamed = max(walk.n - K, 0);
    u32 signs[K];  // the sign bits of the vectors that this thread keeps on chip
    auto copy_one = [&](const Layer& l, const Walk& walk, int streamed, int k) {
        int i = streamed + k;
        if (k < K && i < walk.n) {
            copy_async(slot_of(0, k), l.x + walk.of_x(l.shape, i), policy);
            copy_async(slot_of(1, k), l.dy + walk.of_dy(l.shape, i), policy);
            if (SIGNS) signs[k] = load_bits(bits + walk.of_bits(l.shape, i));
        }
    };
    auto copy_batch = [&](const Layer& l, const Walk& walk, int streamed, int j) {
#pragma unroll
        for (int b = 0; b < BATCH; ++b) copy_one(l, walk, streamed, j * BATCH + b);
        commit();
    };
#pragma unroll
    for (int j = 0; j < AHEAD; ++j) copy_batch(layers.at[layer], walk, streamed, j);
    for (bool first = true; all_slice < slices; all_slice += groups, first = false) {
        const Layer& l = layers.at[layer];
        const Shape& s = l.shape;
        const char *x = l.x, *dy = l.dy;
        char* dx = l.dx;
        const float* stats = l.stats;
        float* partial = l.partial;
        u32* words = l.words;
        const float count = (float)((i64)s.units * EACH_UNIT);
        const int channel = slice * W + threadIdx.x;
        const bool here = threadIdx.x < W && channel < s.C;
        const u32 side = s.parts > 1 ? side_of(words + 2 + slice) : 0;
        float base[V], scale[V], offset[V], s1[V], s2[V];
#pragma unroll
        for (int k = 0; k < V; ++k) {
            int c = slice * W + walk.channel(k);
            bool exists = c < s.C;
            base[k] = exists ? stats[3 * s.C + c] : 0;
            scale[k] = exists ? stats[5 * s.C + c] : 0;
            offset[k] = exists ? stats[6 * s.C + c] : 0;
            s1[k] = s2[k] = 0;
        }
        float low = 0, invstd = 0, factor = 0;
        if (here) {
            low = stats[4 * s.C + channel];
            factor = stats[5 * s.C + channel];
            invstd = stats[7 * s.C + channel];
        }
        // Computes f = x - base, and dz = dy times the activation's derivative. `v` is a vector of x, and `g` is the
        // vector of dy at the same place. If SIGNS, `above` has the sign bits that the forward pass saved for this
        // place: bit k says whether the derivative at value k is 1.
        auto dz_of = [&](const Vec& v, const Vec& g, u32 above, float (&f)[V], float (&dz)[V]) {
            widen(v, f);
            widen(g, dz);
#pragma unroll
            for (int k = 0; k < V; ++k) {
                f[k] -= base[k];
                if (RESIDUAL)
                    dz[k] = ACT == IDENTITY || above >> k & 1 ? dz[k] : ACT == LEAKY_RELU ? dz[k] * slope : 0;
                else
                    dz[k] = activate_backward(dz[k], fmaf(f[k], scale[k], offset[k]), slope);
            }
        };
        auto add = [&](const Vec& v, const Vec& g, u32 above, int i) {
            float f[V], dz[V];
            dz_of(v, g, above, f, dz);
            if (RESIDUAL && dresidual) put(dresidual + walk.of_y(s, i), narrow(dz), s);
#pragma unroll
            for (int k = 0; k < V; ++k) {
                s1[k] += dz[k];
                s2[k] = fmaf(dz[k], f[k], s2[k]);
            }
        };
        auto signs_at = [&](int i) -> u32 { return SIGNS ? load_bits(bits + walk.of_bits(s, i)) : 0; };
        int i = 0;
        for (; i + UNROLL <= streamed; i += UNROLL) {
            Vec v[UNROLL], g[UNROLL];
            u32 above[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                v[u] = load(x + walk.of_x(s, i + u));
                g[u] = load(dy + walk.of_dy(s, i + u));
                above[u] = signs_at(i + u);
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) add(v[u], g[u], above[u], i + u);
        }
        for (; i < streamed; ++i) add(load(x + walk.of_x(s, i)), load(dy + walk.of_dy(s, i)), signs_at(i), i);
        const int kept = walk.n - streamed;
#define COUNT_BATCH(J)                                                                                       \
    if (J < BATCHES) {                                                                                       \
        if (!first) {                                                                                        \
            arrived<(BATCHES > J ? BATCHES - 1 - J : 0)>();                                                  \
        } else {                                                                                             \
            copy_batch(l, walk, streamed, J + AHEAD);                                                        \
            arrived<AHEAD>();                                                                                \
        }                                                                                                    \
        _Pragma("unroll") for (int b = 0; b < BATCH; ++b) {                                                  \
            constexpr int k0 = J * BATCH;                                                                    \
            if (k0 + b < K && k0 + b < kept)                                                                 \
                add(load_slot(slot_of(0, k0 + b)), load_slot(slot_of(1, k0 + b)), SIGNS ? signs[k0 + b] : 0, \
                    streamed + k0 + b);                                                                      \
        }                                                                                                    \
    }
        COUNT_BATCH(0) COUNT_BATCH(1) COUNT_BATCH(2) COUNT_BATCH(3)
        COUNT_BATCH(4) COUNT_BATCH(5) COUNT_BATCH(6) COUNT_BATCH(7)
        float sum1, sum2;
        totals(s1, s2, walk, scratch, sum1, sum2);
        if (s.parts > 1) {
            if (here) ((float2*)partial)[(i64)part * s.C + channel] = make_float2(sum1, sum2);
            meet(words + 2 + slice, side, part, s.parts);
            add_parts((const float2*)partial, s, slice, scratch, sum1, sum2);
        }
        if (here) {
            float dg = (sum2 - low * sum1) * invstd;
            float k2 = factor * (dg * invstd / count);
            shared_k2[threadIdx.x] = k2;
            shared_k0[threadIdx.x] = factor * (sum1 / count) - low * k2;
            if (part == 0) {
                l.dgamma[channel] = dg;
                l.dbeta[channel] = sum1;
            }
        }
        __syncthreads();
        float k2[V], k0[V];
#pragma unroll
        for (int k = 0; k < V; ++k) {
            int c = walk.channel(k);
            k2[k] = shared_k2[c];
            k0[k] = shared_k0[c];
        }
        auto write = [&](const Vec& v, const Vec& g, u32 above, int i) {
            float f[V], dz[V];
            dz_of(v, g, above, f, dz);
#pragma unroll
            for (int k = 0; k < V; ++k) f[k] = fmaf(dz[k], scale[k], -fmaf(f[k], k2[k], k0[k]));
            put(dx + walk.of_y(s, i), narrow(f), s);
        };
        i = streamed;
        for (; i >= UNROLL; i -= UNROLL) {
            Vec v[UNROLL], g[UNROLL];
            u32 above[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                v[u] = load(x + walk.of_x(s, i - 1 - u));
                g[u] = load(dy + walk.of_dy(s, i - 1 - u));
                above[u] = signs_at(i - 1 - u);
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) write(v[u], g[u], above[u], i - 1 - u);
        }
        for (; i > 0; --i) write(load(x + walk.of_x(s, i - 1)), load(dy + walk.of_dy(s, i - 1)), signs_at(i - 1), i - 1);
        slice = all_slice + groups;
        layer = layers.find(slice);
        const Layer& after = layers.at[layer];
        Walk next(after.shape, slice, part);
        if (all_slice + groups >= slices) next.n = 0;
        const int next_streamed = max(next.n - K, 0);
#pragma unroll
        for (int j = 0; j < BATCHES; ++j) {
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                int k = j * BATCH + b;
                if (k < K && k < kept)
                    write(load_slot(slot_of(0, k)), load_slot(slot_of(1, k)), SIGNS ? signs[k] : 0, streamed + k);
                copy_one(after, next, next_streamed, k);
            }
            commit();
        }
        walk = next;
        streamed = next_streamed;
        __syncthreads();
    }
}

#endif
