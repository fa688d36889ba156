// Writes `value` to each of the `words` 32-bit words at `to`. Each thread writes at most one word. graph_memsets.py
// adds this kernel to CUDA graphs.
extern "C" __global__ void fill(unsigned int* to, unsigned long long words, unsigned int value) {
  const unsigned long long i = blockIdx.x * static_cast<unsigned long long>(blockDim.x) + threadIdx.x;
  if (i < words) to[i] = value;
}
