// Emulates a GPU for resident.cu and pixel_blocks.cu: each program (thread block) is an OS thread, and the program's
// threads are fibers that take turns on it.
//
// Asynchronous copies into shared memory happen only when the kernel waits for them. Dynamic shared memory starts as
// NaN.

#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __shared__ static thread_local

struct Index {
    unsigned x;
};
struct float2 {
    float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
struct alignas(16) float4 {
    float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

using std::max;
using std::min;
inline float __uint_as_float(u32 u) { float f; std::memcpy(&f, &u, 4); return f; }
inline u32 __float_as_uint(float f) { u32 u; std::memcpy(&u, &f, 4); return u; }
inline float __int_as_float(int i) { return __uint_as_float((u32)i); }
inline u32 __umulhi(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
template <class T> T __ldcg(const T* at) { return *(const volatile T*)at; }
template <> inline float2 __ldcg(const float2* at) { return {*(const volatile float*)&at->x, *(const volatile float*)&at->y}; }

static thread_local Index threadIdx, blockIdx, gridDim;
static thread_local char memory[232448];

// ---- fibers ----

struct Copy {
    u32 slot;
    const char* from;
};
struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    std::vector<std::vector<Copy>> commits;
    std::vector<Copy> copies;
    bool done = false;
};
static thread_local std::vector<Fiber> fibers;
static thread_local ucontext_t scheduler;
static thread_local const std::function<void()>* body;
static thread_local u64 passed;        // number of calls of __syncthreads() that all threads have made
static thread_local int waiting;       // number of threads that wait in __syncthreads()
// How often each group of lanes has met. The index is the group's first thread, plus THREADS for a whole warp.
static thread_local u64 met[2 * THREADS];
static thread_local int here[2 * THREADS];
static thread_local u32 shown[THREADS];

inline void yield() {
    unsigned me = threadIdx.x;
    swapcontext(&fibers[me].context, &scheduler);
    threadIdx.x = me;
}

inline void __syncthreads() {
    u64 turn = passed;
    if (++waiting == THREADS) {
        waiting = 0;
        ++passed;
    }
    while (passed == turn) yield();
}

// Wait for the other lanes of `mask` in this warp.
inline void gather(u32 mask) {
    // Whole warps have counters of their own, because some lanes may already wait for the whole warp while others still
    // wait for a smaller group.
    unsigned first = threadIdx.x / 32 * 32 + __builtin_ctz(mask) + (mask == ~0u ? THREADS : 0);
    u64 turn = met[first];
    if (++here[first] == __builtin_popcount(mask)) {
        here[first] = 0;
        ++met[first];
    }
    while (met[first] == turn) yield();
}

inline void __syncwarp() { gather(~0u); }

inline u32 lane_value(u32 mask, u32 mine, unsigned lane) {
    shown[threadIdx.x] = mine;
    gather(mask);
    u32 found = shown[threadIdx.x / 32 * 32 + lane];
    gather(mask);
    return found;
}
inline u32 __shfl_xor_sync(u32 mask, u32 v, int step) { return lane_value(mask, v, threadIdx.x % 32 ^ step); }
inline float __shfl_xor_sync(u32 mask, float v, int step) {
    return __uint_as_float(__shfl_xor_sync(mask, __float_as_uint(v), step));
}
inline u32 __shfl_sync(u32 mask, u32 v, int lane) { return lane_value(mask, v, lane); }
inline bool __any_sync(u32 mask, bool p) {
    u32 any = 0;
    for (int lane = 0; lane < 32; ++lane) any |= lane_value(mask, p, lane);
    return any;
}

// ---- instructions of the GPU ----

inline u32 address(const char* shared) { return (u32)(shared - memory); }

inline void from_halves(u32 w, float& a, float& b) {
    _Float16 h[2];
    std::memcpy(h, &w, 4);
    a = h[0], b = h[1];
}
inline u32 to_halves(float a, float b) {
    _Float16 h[2] = {(_Float16)a, (_Float16)b};
    u32 w;
    std::memcpy(&w, h, 4);
    return w;
}
inline u32 to_bfloat(float f) {
    u32 u = __float_as_uint(f);
    return std::isnan(f) ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
inline u32 to_bfloats(float a, float b) { return to_bfloat(a) | to_bfloat(b) << 16; }

inline u64 evict_first() { return 0; }
inline void copy_async(u32 slot, const char* from, u64) { fibers[threadIdx.x].copies.push_back({slot, from}); }
inline void copy_async(u32 slot, const char* from) { copy_async(slot, from, 0); }
inline void clear(u32 slot) { std::memset(memory + slot, 0, 16); }
inline void commit() {
    Fiber& fiber = fibers[threadIdx.x];
    fiber.commits.push_back(std::move(fiber.copies));
    fiber.copies.clear();
}
template <int LEFT> void arrived() {
    auto& commits = fibers[threadIdx.x].commits;
    while (commits.size() > LEFT) {
        for (const Copy& copy : commits.front()) std::memcpy(memory + copy.slot, copy.from, 16);
        commits.erase(commits.begin());
    }
}
inline Vec load(const char* from) { Vec v; std::memcpy(&v, from, 16); return v; }
inline Vec load_slot(u32 slot) { return load(memory + slot); }
inline void store(char* to, const Vec& v) { std::memcpy(to, &v, 16); }
inline void store_through(char* to, const Vec& v) { store(to, v); }
inline void fetch(const char*) {}
template <bool TRANSPOSED> void load_matrices(u32 (&m)[4], u32 slot) {
    shown[threadIdx.x] = slot;
    gather(~0u);
    const u32* rows = shown + threadIdx.x / 32 * 32;
    int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 2; ++k)
            std::memcpy((short*)&m[i] + k, TRANSPOSED ? memory + rows[i * 8 + column + k] + row * 2 : memory + rows[i * 8 + row] + (column + k) * 2, 2);
    gather(~0u);
}
static thread_local u32 factors[THREADS][6];
inline float half_of(u32 w, int k) {
    float pair[2];
    if (KIND == 0) pair[0] = __uint_as_float(w << 16), pair[1] = __uint_as_float(w & 0xffff0000u);
    else from_halves(w, pair[0], pair[1]);
    return pair[k];
}
inline void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    u32* mine = factors[threadIdx.x];
    std::memcpy(mine, a, 16);
    mine[4] = b0, mine[5] = b1;
    gather(~0u);
    u32 (*all)[6] = factors + threadIdx.x / 32 * 32;
    for (int i = 0; i < 4; ++i) {
        int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k)  // read from the lanes that hold the row of a and the column of b
            c[i] += half_of(all[row * 4 + k % 8 / 2][i / 2 + k / 8 * 2], k % 2) * half_of(all[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
    }
    gather(~0u);
}
inline float exponential(float v) { return std::exp2(v * 1.4426950408889634f); }
inline float quotient(float a, float b) { return a / b; }
inline u32 peek(const u32* word) {
    u32 now = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    std::this_thread::yield();
    return now;
}
inline u32 glance(const u32* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
inline void arrive(u32* word, u32 step) { __atomic_fetch_add(word, step, __ATOMIC_RELEASE); }
inline void acquire() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
inline u32 add_release(u32* word, u32 step) { return __atomic_fetch_add(word, step, __ATOMIC_RELEASE); }

// ---- launches ----

static void start_fiber() {
    (*body)();
    fibers[threadIdx.x].done = true;
    swapcontext(&fibers[threadIdx.x].context, &scheduler);
}

static void run_program(unsigned index, unsigned programs, const std::function<void()>& kernel) {
    blockIdx.x = index, gridDim.x = programs, body = &kernel;
    std::memset(memory, 0xff, sizeof memory);
    fibers = std::vector<Fiber>(THREADS);
    for (Fiber& fiber : fibers) {
        fiber.stack = std::make_unique<char[]>(1 << 16);
        getcontext(&fiber.context);
        fiber.context.uc_stack = {fiber.stack.get(), 0, 1 << 16};
        makecontext(&fiber.context, start_fiber, 0);
    }
    for (bool left = true; left;) {
        left = false;
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) {
            unsigned me = threadIdx.x;
            if (!fibers[me].done) swapcontext(&scheduler, &fibers[me].context);
            threadIdx.x = me;
            left |= !fibers[me].done;
        }
    }
}

static void launch(unsigned programs, const std::function<void()>& kernel) {
    std::vector<std::thread> all;
    for (unsigned i = 0; i < programs; ++i) all.emplace_back(run_program, i, programs, std::cref(kernel));
    for (std::thread& one : all) one.join();
}
