// Write a value to every 32-bit word of a buffer; launched by graph_memsets.py. A thread writes up to four words.
extern "C" __global__ void fill(unsigned int* to, unsigned long long words, unsigned int value) {
  const unsigned long long first = 4ull * (blockIdx.x * static_cast<unsigned long long>(blockDim.x) + threadIdx.x);
  for (unsigned long long i = first; i < first + 4 && i < words; ++i) to[i] = value;
}
