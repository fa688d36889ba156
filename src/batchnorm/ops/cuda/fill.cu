// Writes `value` to each of the `words` 32-bit words at `to`. graph_memsets.py adds this kernel to CUDA graphs. Each
// thread writes at most four words. If `words` is a multiple of four and `to` is aligned to 16 bytes, a thread writes
// its words in one store.
extern "C" __global__ void fill(unsigned int* to, unsigned long long words, unsigned int value) {
  const unsigned long long first = 4 * (blockIdx.x * static_cast<unsigned long long>(blockDim.x) + threadIdx.x);
  if (words % 4 == 0 && reinterpret_cast<unsigned long long>(to) % 16 == 0) {
    if (first < words) *reinterpret_cast<uint4*>(to + first) = make_uint4(value, value, value, value);
  } else {
    for (unsigned long long i = first; i < words && i < first + 4; ++i) to[i] = value;
  }
}
