// The network's first convolution and the gradient of its weights, computed by tensor cores on blocks of 2x2 pixels.
//
// In this file, a block is a block of 2x2 image pixels, and a program is a CUDA thread block. A block has CHANNELS
// values: the INPUTS channels of its four pixels, followed by zeros. If each image has an output of rows x columns
// pixels, the blocks of all images form a tensor of shape (images, rows + TAPS - 1, columns + TAPS - 1, CHANNELS). An
// output pixel depends on a window of TAPS x TAPS blocks. A tap is the position of a block in a window. A tile is a
// sequence of up to PIXELS consecutive output pixels of one image. A program processes one tile after another. For each
// tile, the program copies the necessary rows of blocks to shared memory. It copies each block once per tile, although
// the windows of neighboring pixels overlap. For one tap, each output pixel reads one block; the blocks that 16 output
// pixels read form a 16 x CHANNELS matrix, which ldmatrix reads directly.
//
// These macros are defined when the file is compiled:
// - KIND: 0 for bfloat16, 1 for float16
// - THREADS: threads per program
// - EACH: number of programs that must fit on a multiprocessor (not used by add_parts)
// - PIXELS: output pixels per tile, a multiple of THREADS
// - FORWARD: defined for the kernel "convolve", not defined for the other kernels

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define TAPS 4
#define SIZE 7  // a filter has SIZE x SIZE weights for each of the image's INPUTS channels
#define FRONT 1  // number of pixels by which a window extends above the filter, and to the left of it
#define INPUTS 3
#define CHANNELS 16
#define OUT 64  // number of output channels
#define WEIGHTS (INPUTS * SIZE * SIZE)
#define VALUES (TAPS * TAPS * CHANNELS)  // number of values in a window, including those without a weight
#define BLOCK_BYTES (CHANNELS * 2)
#define PIXEL_BYTES (OUT * 2)

struct alignas(16) Vec {
    u32 w[4];
};

// ---- machine instructions ----
// All PTX is in this section. tests/emulated.hpp has the same functions in C++, so that the tests can run the rest of
// this file on a CPU.

#ifdef EMULATED
#include EMULATED
#else

extern __shared__ __align__(16) char memory[];

__device__ __forceinline__ u32 address(const char* shared) { return (u32)__cvta_generic_to_shared(shared); }

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

// copy_async() starts to copy 16 bytes from global to shared memory. commit() puts the thread's copies since the last
// commit() into a group. arrived<n>() waits until at most n of the thread's groups are pending.
__device__ __forceinline__ void copy_async(u32 slot, const char* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(slot), "l"(from) : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void arrived() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ void store(char* to, const Vec& v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"l"(to), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]) : "memory");
}

__device__ __forceinline__ void clear(u32 slot) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(slot), "r"(0) : "memory");
}

// Loads four 8x8 matrices of 16-bit numbers, transposed if TRANSPOSED. Lane l of the warp passes the address of row
// l % 8 of matrix l / 8.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(u32 (&m)[4], u32 slot) {
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(slot) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(slot) : "memory");
}

// Adds the product of the 16x16 matrix a and the 16x8 matrix (b0, b1) to the 16x8 matrix c.
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if KIND == 0
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
    asm(MMA "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif

__device__ __forceinline__ u32 narrow(float a, float b) { return KIND == 0 ? to_bfloats(a, b) : to_halves(a, b); }

// Given the index of a value in a window, returns the index of its weight among the WEIGHTS weights of an output
// channel. Returns -1 if the value has no weight, because it is outside the filter or only pads its block.
__device__ __forceinline__ int weight_of(int value) {
    int tap = value / CHANNELS, channel = value % CHANNELS, pixel = channel / INPUTS;
    int h = tap / TAPS * 2 + pixel / 2 - FRONT, w = tap % TAPS * 2 + pixel % 2 - FRONT;
    bool has = pixel < 4 && h >= 0 && h < SIZE && w >= 0 && w < SIZE;
    return has ? (channel % INPUTS * SIZE + h) * SIZE + w : -1;
}

// A tile of output pixels, and a copy in shared memory of the blocks that these pixels depend on.
struct Tile {
    i64 image;
    int first, end;  // the tile's output pixels have the indices first <= i < end in their image
    int row, width;  // row: index of the first row of blocks that the tile needs; width: number of blocks per row
    u32 blocks;      // the address of the copied blocks in shared memory
    int* corners;    // for each output pixel, the index of its window's top left block among the copied blocks

    __device__ __forceinline__ Tile(int index, int rows, int columns, char* memory_of_blocks, int* corners)
        : corners(corners) {
        int tiles = (rows * columns + PIXELS - 1) / PIXELS;
        image = index / tiles;
        first = index % tiles * PIXELS;
        end = min(first + PIXELS, rows * columns);
        row = first / columns;
        width = columns + TAPS - 1;
        blocks = address(memory_of_blocks);
    }

    // Returns the address of one 16-byte half of a copied block. Of eight consecutive blocks, four have their halves
    // swapped, so that ldmatrix reads the same half of all eight blocks from different banks.
    __device__ __forceinline__ u32 slot(int block, int half) const {
        return blocks + block * BLOCK_BYTES + ((half ^ (block >> 2 & 1)) << 4);
    }

    __device__ __forceinline__ void copy_blocks(const char* from, int rows, int columns) const {
        for (int i = threadIdx.x; i < PIXELS; i += THREADS) {
            int pixel = min(first + i, end - 1);  // past the end of the tile, use the window of its last pixel
            corners[i] = (pixel / columns - row) * width + pixel % columns;
        }
        from += (image * (rows + TAPS - 1) + row) * width * BLOCK_BYTES;
        int vectors = ((end - 1) / columns - row + TAPS) * width * 2;
        for (int i = threadIdx.x; i < vectors; i += THREADS) copy_async(slot(i / 2, i % 2), from + (i64)i * 16);
    }
};

// Shared memory holds the corners and the blocks of two tiles, so that the next tile is copied while the current tile
// is processed. `bytes` is the maximum size of one tile's blocks.
__device__ __forceinline__ int* corners_of(int buffer) { return (int*)memory + buffer * PIXELS; }
__device__ __forceinline__ char* data_of(int buffer, int bytes) { return memory + 8 * PIXELS + buffer * bytes; }

#ifdef FORWARD

// A warp computes 32 output channels of 64 pixels at a time. It keeps the weights of these channels in registers.
// In shared memory, each output channel takes STRIDE values: a weight for each value in a window (0 if the value has no
// weight) and 8 values of padding, which avoid bank conflicts.
#define STRIDE (VALUES + 8)

extern "C" __global__ void __launch_bounds__(THREADS, EACH) convolve(
    const char* blocks, const float* kernel, char* y, int images, int rows, int columns, int bytes) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = lane / 16;
    const int side = warp % 2;
    const int tiles = images * ((rows * columns + PIXELS - 1) / PIXELS);
    auto copy = [&](int index, int buffer) {
        if (index < tiles)
            Tile(index, rows, columns, data_of(buffer, bytes), corners_of(buffer)).copy_blocks(blocks, rows, columns);
        commit();
    };
    copy(blockIdx.x, 0);

    // Copy the weights to shared memory with reordered output channels, so that a thread computes eight consecutive
    // channels of a pixel of y and stores them as one vector.
    u32* weights = (u32*)data_of(2, bytes);
    for (int value = threadIdx.x; value < VALUES; value += THREADS) {
        const int column = weight_of(value);
#pragma unroll
        for (int k = 0; k < OUT; ++k) {
            int n = k % 8, channel = k / 32 * 32 + n / 2 * 8 + k / 8 % 4 * 2 + n % 2;
            float w = column < 0 ? 0 : kernel[channel * WEIGHTS + column];
            ((unsigned short*)weights)[k * STRIDE + value] = (unsigned short)narrow(w, 0);
        }
    }
    __syncthreads();
    u32 b[TAPS * TAPS][4][2];
#pragma unroll
    for (int tap = 0; tap < TAPS * TAPS; ++tap)
#pragma unroll
        for (int t = 0; t < 4; ++t)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                int at = (side * 32 + t * 8 + lane / 4) * STRIDE + tap * CHANNELS + i * 8 + lane % 4 * 2;
                b[tap][t][i] = weights[at / 2];
            }

    int buffer = 0;
    for (int index = blockIdx.x; index < tiles; index += gridDim.x, buffer ^= 1) {
        copy(index + gridDim.x, buffer ^ 1);
        arrived<1>();
        __syncthreads();
        const Tile tile(index, rows, columns, data_of(buffer, bytes), corners_of(buffer));
        for (int from = warp / 2 * 64; from < PIXELS; from += THREADS) {
            float sums[4][4][4] = {};
            int corner[4];
#pragma unroll
            for (int s = 0; s < 4; ++s) corner[s] = tile.corners[from + s * 16 + lane % 16];
#pragma unroll
            for (int tap = 0; tap < TAPS * TAPS; ++tap) {
#pragma unroll
                for (int s = 0; s < 4; ++s) {
                    u32 a[4];
                    load_matrices<false>(a, tile.slot(corner[s] + tap / TAPS * tile.width + tap % TAPS, half));
#pragma unroll
                    for (int t = 0; t < 4; ++t) multiply(sums[s][t], a, b[tap][t][0], b[tap][t][1]);
                }
            }
#pragma unroll
            for (int s = 0; s < 4; ++s)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    int pixel = tile.first + from + s * 16 + i * 8 + lane / 4;
                    Vec v;
#pragma unroll
                    for (int t = 0; t < 4; ++t) v.w[t] = narrow(sums[s][t][2 * i], sums[s][t][2 * i + 1]);
                    i64 at = (tile.image * rows * columns + pixel) * PIXEL_BYTES + side * 64 + lane % 4 * 16;
                    if (pixel < tile.end) store(y + at, v);
                }
        }
        __syncthreads();
    }
}

#else

// Each warp sums the gradient of the weights for one row of taps, over half of each tile's output pixels. For each tap
// and each group of 16 pixels, the warp multiplies the transposed gradient of the output by the matrix of the blocks
// that these pixels read. Each program writes its sums to `partial`, which has the shape (programs, OUT, VALUES).
extern "C" __global__ void __launch_bounds__(THREADS, EACH) kernel_gradient(
    const char* blocks, const char* dy, float* partial, int images, int rows, int columns, int bytes) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = lane / 16;
    const int tap_row = warp % TAPS, from = warp / TAPS * (PIXELS / 2);
    const int tiles = images * ((rows * columns + PIXELS - 1) / PIXELS);
    // Returns the address in shared memory of one of the eight 16-byte vectors of a pixel's gradient. The order of the
    // vectors differs between pixels, to avoid bank conflicts.
    auto gradient_slot = [&](int buffer, int pixel, int vector) {
        return address(data_of(2, bytes)) + (buffer * PIXELS + pixel) * PIXEL_BYTES + ((vector ^ pixel % 8) << 4);
    };
    auto copy = [&](int index, int buffer) {
        if (index < tiles) {
            const Tile tile(index, rows, columns, data_of(buffer, bytes), corners_of(buffer));
            tile.copy_blocks(blocks, rows, columns);
            const char* source = dy + (tile.image * rows * columns + tile.first) * PIXEL_BYTES;
            for (int i = threadIdx.x; i < PIXELS * 8; i += THREADS) {
                if (tile.first + i / 8 < tile.end)
                    copy_async(gradient_slot(buffer, i / 8, i % 8), source + (i64)i * 16);
                else
                    clear(gradient_slot(buffer, i / 8, i % 8));
            }
        }
        commit();
    };
    float sums[4][2 * TAPS][4] = {};
    copy(blockIdx.x, 0);
    int buffer = 0;
    for (int index = blockIdx.x; index < tiles; index += gridDim.x, buffer ^= 1) {
        copy(index + gridDim.x, buffer ^ 1);
        arrived<1>();
        __syncthreads();
        const Tile tile(index, rows, columns, data_of(buffer, bytes), corners_of(buffer));
#pragma unroll 2
        for (int pixel = from; pixel < from + PIXELS / 2; pixel += 16) {
            int corner = tile.corners[pixel + lane % 16] + tap_row * tile.width;
            u32 a[4][4];
#pragma unroll
            for (int s = 0; s < 4; ++s)
                load_matrices<true>(a[s], gradient_slot(buffer, pixel + half * 8 + lane % 8, s * 2 + lane / 8 % 2));
#pragma unroll
            for (int tap = 0; tap < TAPS; ++tap) {
                u32 b[4];
                load_matrices<true>(b, tile.slot(corner + tap, half));
#pragma unroll
                for (int s = 0; s < 4; ++s) {
                    multiply(sums[s][2 * tap], a[s], b[0], b[1]);
                    multiply(sums[s][2 * tap + 1], a[s], b[2], b[3]);
                }
            }
        }
        __syncthreads();
    }

    // For each row of taps, add the sums of the two warps that processed the two halves of the pixels.
    float2* other = (float2*)memory + tap_row * (4 * 2 * TAPS * 2 * 32) + lane;
#pragma unroll
    for (int i = 0; i < 4 * 2 * TAPS * 2; ++i) {
        const float* sum = &sums[i / 2 / (2 * TAPS)][i / 2 % (2 * TAPS)][i % 2 * 2];
        if (from) other[i * 32] = make_float2(sum[0], sum[1]);
    }
    __syncthreads();
    if (from) return;
#pragma unroll
    for (int i = 0; i < 4 * 2 * TAPS * 2; ++i) {
        int s = i / 2 / (2 * TAPS), n = i / 2 % (2 * TAPS), channel = s * 16 + i % 2 * 8 + lane / 4;
        const float* sum = &sums[s][n][i % 2 * 2];
        int value = tap_row * TAPS * CHANNELS + n * 8 + lane % 4 * 2;
        float2 both = make_float2(sum[0] + other[i * 32].x, sum[1] + other[i * 32].y);
        *(float2*)(partial + (blockIdx.x * OUT + channel) * VALUES + value) = both;
    }
}

// Adds up the sums that the programs of kernel_gradient() wrote to `partial`, and writes the gradient of the weights to
// `total`. A program of add_parts handles 32 values of the window for one output channel. Each of its warps adds up the
// sums of every (THREADS / 32)-th program of kernel_gradient(). Its first warp then adds up the results of all warps.
extern "C" __global__ void __launch_bounds__(THREADS) add_parts(const float* partial, float* total, int parts) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, at = blockIdx.x * 32 + lane;
    float sum = 0;
#pragma unroll 4
    for (int part = warp; part < parts; part += THREADS / 32) sum += partial[part * (OUT * VALUES) + at];
    float* sums = (float*)memory;
    sums[threadIdx.x] = sum;
    __syncthreads();
    const int column = weight_of(at % VALUES);
    if (warp || column < 0) return;
#pragma unroll
    for (int k = 1; k < THREADS / 32; ++k) sum += sums[k * 32 + lane];
    total[at / VALUES * WEIGHTS + column] = sum;
}

#endif
