// Batch normalization of float32 tensors in training, y = g(z) with z = BN(x) + residual, and its gradient. When
// compiler.py compiles this file, it defines a macro for each activation g: IDENTITY, RELU, ...
//
// There are two kinds of tensors. "Planes" have the shape (n, channels, length); a plane is the `length` values of one
// channel in one example. "Rows" have the shape (n, channels); for them, the field `length` of Shape is 0.
//
// The work is divided into tasks, which run on several threads. For planes, a task is a group of neighboring channels,
// so that their values may stay in the cache between passes. For rows, a task is a block of rows, and the sums of the
// blocks are merged in a fixed order. The tasks do not depend on the number of threads, so the results do not either.
// Both kinds of tasks use functions that process a matrix, in which each column belongs to one channel. For rows, a
// matrix row may hold several rows of the tensor. To avoid confusion, a row of the tensor is called a position.
//
// The statistics need two passes: the first computes `rough`, an approximate mean, and the second computes the sums of
// d = x - rough and of d^2. These sums are precise, however far the mean is from zero, because `rough` is close to the
// mean. BN(x) is computed as (x - center) * scale + offset, where `center` is the mean rounded to float32, and `offset`
// is beta with a correction for this rounding. This is precise for the same reason: `center` is close to the mean.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

typedef int64_t i64;

typedef struct {
    i64 n, channels, length, activation;
    double slope; // leaky ReLU's slope below zero
    // GOMP_parallel, omp_get_thread_num and omp_get_num_threads of torch's OpenMP library
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    int (*thread)(void), (*team)(void);
} Shape;

typedef struct {
    Shape shape;
    const float *x, *dy, *gamma, *beta, *residual;
    float *y, *dx, *dz, *dgamma, *dbeta;
    unsigned char *passed; // per value: whether g'(z) is 1; used only if there is a residual and g' takes two values
    float *kept;           // for each channel: center, scale, offset, 1/std, mean - center
    double eps, *mean, *var;
    i64 tasks, threads;
    int bad; // whether any channel is bad, as defined in keep()
    // The last five fields are used only for rows.
    i64 positions, block, width; // positions per matrix row, matrix rows per block, columns per matrix
    float *lines, *sums;         // the coefficients of each column, the sums of each block
} Call;

// Indices of the coefficients in z = (x - center) * scale + offset (plus a residual, if there is one) and in
// dx = dz * scale + (x - center) * slope + level. LINES is the number of coefficients.
enum { CENTER, SCALE, OFFSET, SLOPE, LEVEL, LINES };
// In the array `kept`, 1/std and mean - center take the places of the slope and the level.
enum { INVSTD = SLOPE, LACK = LEVEL };

enum {
    // planes: a group of channels (see Group) has at least this many values per example, except in the last group
    RUN = 256,
    WIDTH = 1024,  // maximum number of columns of a matrix, except for rows with more than WIDTH channels
    NARROW = 64,   // rows: minimum number of columns of a matrix
    ADDED = 256,   // planes: maximum number of rows of a matrix; see also fold_when_due
    BLOCK = 65536, // rows: maximum number of values in a block, unless ROWS matrix rows hold more
    ROWS = 64,     // rows: minimum number of matrix rows in a block, except in the last block
    TASKS = 16,    // rows: minimum number of blocks, unless blocks would then have fewer than ROWS matrix rows
};

INLINE i64 least(i64 a, i64 b) { return a < b ? a : b; }

#ifdef __clang__
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

// ---- g and its derivative g'; where g is not differentiable, g' has the same value as in torch ----

// Computes exp(v) as 2^n * exp(r), where v = n ln(2) + r, n is an integer, and a polynomial approximates exp(r). First
// clamps v to the range from -87 to 88, in which the relative error is about 1e-7. Compilers can vectorize this
// function.
INLINE float exponential(float v) {
    union {
        float f;
        uint32_t u;
    } n, power;
    v = v < -87 ? -87 : v > 88 ? 88 : v;
    n.f = v * 1.44269504f + 12582912; // adding 1.5 * 2^23 puts the integer nearest to v / ln(2) into the lowest bits
    power.u = (n.u + 127) << 23;
    float whole = n.f - 12582912, r = v - whole * 0.693359375f + whole * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return (p * r * r + r + 1) * power.f;
}

INLINE float sigmoid(float z) { return 1 / (1 + exponential(-z)); }

INLINE float hyperbolic_tangent(float z) {
    float q = z * z, near = 2 * sigmoid(2 * z) - 1; // for small z, `near` is inaccurate because of cancellation
    float series = z + z * q * (-1 / 3.0f + q * (2 / 15.0f + q * (-17 / 315.0f + q * (62 / 2835.0f))));
    return q < 0.09f ? series : near;
}

INLINE float activate(float z, int activation, float below) {
    if (activation == RELU) return z < 0 ? 0 : z; // NaN stays NaN
    if (activation == LEAKY_RELU) return z > 0 ? z : z * below;
    if (activation == SIGMOID) return sigmoid(z);
    if (activation == TANH) return hyperbolic_tangent(z);
    if (activation == SILU) return z * sigmoid(z);
    if (activation == RELU6) return z < 0 ? 0 : z > 6 ? 6 : z;
    if (activation == HARDSWISH) {
        float gate = z + 3;
        gate = gate < 0 ? 0 : gate;
        return z * (gate > 6 ? 6 : gate) / 6;
    }
    return z;
}

// Returns whether g'(z) is 1, for activations g whose derivative takes only two values. If z is NaN, the result is true
// for ReLU and ReLU6.
INLINE int passes(float z, int activation) {
    if (activation == RELU) return !(z <= 0);
    if (activation == RELU6) return !(z <= 0) & !(z >= 6);
    return z > 0;
}

INLINE float activate_backward(float dy, float z, int activation, float below) {
    if (activation == RELU || activation == RELU6) return passes(z, activation) ? dy : 0;
    if (activation == LEAKY_RELU) return z > 0 ? dy : dy * below;
    if (activation == SIGMOID) {
        float s = sigmoid(z);
        return dy * s * (1 - s);
    }
    if (activation == TANH) {
        float t = hyperbolic_tangent(z);
        return dy * (1 - t * t);
    }
    if (activation == SILU) {
        float s = sigmoid(z);
        return dy * s * (1 + z * (1 - s));
    }
    if (activation == HARDSWISH) {
        float inner = z < 3 ? dy * (z / 3 + 0.5f) : dy;
        return z <= -3 ? 0 : inner;
    }
    return dy;
}

// ---- add up the columns of a matrix of `rows` rows and `width` columns; rows are `stride` values apart ----

INLINE void add(const float *restrict x, i64 rows, i64 stride, i64 width, float *restrict sum) {
    i64 i = 0;
    for (; i + 4 <= rows; i += 4, x += 4 * stride)
        for (i64 j = 0; j < width; ++j)
            sum[j] += (x[j] + x[stride + j]) + (x[2 * stride + j] + x[3 * stride + j]);
    for (; i < rows; ++i, x += stride)
        for (i64 j = 0; j < width; ++j) sum[j] += x[j];
}

INLINE void add_squares(
    const float *restrict x, i64 rows, i64 stride, i64 width, const float *restrict rough, float *restrict first,
    float *restrict second) {
    i64 i = 0;
    for (; i + 4 <= rows; i += 4, x += 4 * stride)
        for (i64 j = 0; j < width; ++j) {
            float a = x[j] - rough[j], b = x[stride + j] - rough[j];
            float c = x[2 * stride + j] - rough[j], d = x[3 * stride + j] - rough[j];
            first[j] += (a + b) + (c + d);
            second[j] += (a * a + b * b) + (c * c + d * d);
        }
    for (; i < rows; ++i, x += stride)
        for (i64 j = 0; j < width; ++j) {
            float d = x[j] - rough[j];
            first[j] += d;
            second[j] += d * d;
        }
}

// ---- passes over one matrix: the same elements of x and of all other tensors of x's shape ----

// In these passes, lines[i * pitch + j] is coefficient i (CENTER, SCALE, ...) of column j.

typedef struct {
    i64 at, rows, stride, width; // the matrix starts at index `at` of the tensors
} Matrix;

static void add_to(const Call *c, Matrix m, float *sum) { add(c->x + m.at, m.rows, m.stride, m.width, sum); }

static void add_squares_to(const Call *c, Matrix m, const float *rough, float *first, float *second) {
    add_squares(c->x + m.at, m.rows, m.stride, m.width, rough, first, second);
}

// Computes y = g(z). If `added`, z includes the residual. If `marked`, also stores in `passed` whether g'(z) is 1.
INLINE void transform(
    const Call *c, Matrix m, const float *restrict lines, i64 pitch, int activation, int added, int marked) {
    const float *center = lines + CENTER * pitch, *scale = lines + SCALE * pitch, *offset = lines + OFFSET * pitch;
    const float below = (float)c->shape.slope;
    for (i64 i = 0; i < m.rows; ++i, m.at += m.stride) {
        const float *restrict x = c->x + m.at, *restrict residual = added ? c->residual + m.at : 0;
        float *restrict y = c->y + m.at;
        unsigned char *restrict passed = marked ? c->passed + m.at : 0;
        INDEPENDENT for (i64 j = 0; j < m.width; ++j) {
            float z = (x[j] - center[j]) * scale[j] + offset[j];
            if (added) z += residual[j];
            if (marked) passed[j] = (unsigned char)passes(z, activation);
            y[j] = activate(z, activation, below);
        }
    }
}

// Returns dz = g'(z) dy for one value. If `marked`, `passed` says whether g'(z) is 1; otherwise, z determines g'(z).
INLINE float dz_of(float dy, float z, int passed, int activation, float below, int marked) {
    if (!marked) return activate_backward(dy, z, activation, below);
    return passed ? dy : activation == LEAKY_RELU ? dy * below : 0;
}

// For each column, adds the sum of dz to `first` and the sum of dz * (x - center) to `second`. If `added`, z includes
// the residual. If `marked`, `passed` says whether g'(z) is 1. If `written`, also stores dz.
INLINE void reduce(
    const Call *c, Matrix m, const float *restrict lines, i64 pitch, float *restrict first, float *restrict second,
    int activation, int added, int marked, int written) {
    const float *center = lines + CENTER * pitch, *scale = lines + SCALE * pitch, *offset = lines + OFFSET * pitch;
    const float below = (float)c->shape.slope;
    for (i64 i = 0, rows; i < m.rows; i += rows, m.at += rows * m.stride) {
        const float *restrict x = c->x + m.at, *restrict dy = c->dy + m.at;
        const float *restrict residual = added ? c->residual + m.at : 0;
        const unsigned char *restrict passed = marked ? c->passed + m.at : 0;
        float *restrict dz = written ? c->dz + m.at : 0;
        const i64 n = m.stride;
#define Z(AT, D) (added ? D * scale[j] + offset[j] + residual[AT] : D * scale[j] + offset[j])
#define DZ(AT, D) dz_of(dy[AT], Z(AT, D), marked ? passed[AT] : 0, activation, below, marked)
        if (i + 2 <= m.rows) {
            rows = 2;
            INDEPENDENT for (i64 j = 0; j < m.width; ++j) {
                float a = x[j] - center[j], b = x[n + j] - center[j], g = DZ(j, a), h = DZ(n + j, b);
                if (written) dz[j] = g, dz[n + j] = h;
                first[j] += g + h;
                second[j] += g * a + h * b;
            }
        } else {
            rows = 1;
            INDEPENDENT for (i64 j = 0; j < m.width; ++j) {
                float d = x[j] - center[j], g = DZ(j, d);
                if (written) dz[j] = g;
                first[j] += g;
                second[j] += g * d;
            }
        }
#undef DZ
#undef Z
    }
}

// Computes dx. `from` is dz if `activation` is IDENTITY, and otherwise dy. `from` and dx may be the same memory.
INLINE void differentiate(const Call *c, Matrix m, const float *lines, i64 pitch, const float *from, int activation) {
    const float *center = lines + CENTER * pitch, *scale = lines + SCALE * pitch, *offset = lines + OFFSET * pitch;
    const float *slope = lines + SLOPE * pitch, *level = lines + LEVEL * pitch, below = (float)c->shape.slope;
    for (i64 i = 0; i < m.rows; ++i, m.at += m.stride) {
        const float *x = c->x + m.at, *g = from + m.at;
        float *dx = c->dx + m.at;
        INDEPENDENT for (i64 j = 0; j < m.width; ++j) {
            float d = x[j] - center[j], z = d * scale[j] + offset[j];
            dx[j] = dz_of(g[j], z, 0, activation, below, 0) * scale[j] + (d * slope[j] + level[j]);
        }
    }
}

// The next three functions pass constants to the loops above, so that the compiler generates a specialized, fast loop
// for each activation.
#define HAS_TWO_SLOPES(G) (G == RELU || G == LEAKY_RELU || G == RELU6)
#define FOR_EACH_ACTIVATION(CASE)                              \
    switch (c->shape.activation) {                             \
        CASE(IDENTITY) CASE(RELU) CASE(LEAKY_RELU) CASE(RELU6) \
        CASE(SIGMOID) CASE(TANH) CASE(SILU) CASE(HARDSWISH)    \
    }

static void transform_to(const Call *c, Matrix m, const float *lines, i64 pitch) {
#define CASE(G)                                         \
    case G:                                             \
        if (!c->residual)                               \
            transform(c, m, lines, pitch, G, 0, 0);     \
        else if (HAS_TWO_SLOPES(G) && c->passed)        \
            transform(c, m, lines, pitch, G, 1, 1);     \
        else                                            \
            transform(c, m, lines, pitch, G, 1, 0);     \
        break;
    FOR_EACH_ACTIVATION(CASE)
#undef CASE
}

// Calls `reduce`, which also stores dz if dz depends on a residual, or if computing g' a second time would be slow. If
// dz is not stored, differentiate_to computes dz again.
static void reduce_to(const Call *c, Matrix m, const float *lines, i64 pitch, float *first, float *second) {
#define CASE(G)                                                          \
    case G:                                                              \
        if (HAS_TWO_SLOPES(G) && c->passed)                              \
            reduce(c, m, lines, pitch, first, second, G, 0, 1, 1);       \
        else if (HAS_TWO_SLOPES(G) || G == IDENTITY)                     \
            reduce(c, m, lines, pitch, first, second, G, 0, 0, 0);       \
        else if (c->residual)                                            \
            reduce(c, m, lines, pitch, first, second, G, 1, 0, 1);       \
        else                                                             \
            reduce(c, m, lines, pitch, first, second, G, 0, 0, 1);       \
        break;
    FOR_EACH_ACTIVATION(CASE)
#undef CASE
}

static void differentiate_to(const Call *c, Matrix m, const float *lines, i64 pitch) {
    if (c->dz)
        differentiate(c, m, lines, pitch, c->dz, IDENTITY);
    else if (c->shape.activation == RELU)
        differentiate(c, m, lines, pitch, c->dy, RELU);
    else if (c->shape.activation == RELU6)
        differentiate(c, m, lines, pitch, c->dy, RELU6);
    else if (c->shape.activation == LEAKY_RELU)
        differentiate(c, m, lines, pitch, c->dy, LEAKY_RELU);
    else
        differentiate(c, m, lines, pitch, c->dy, IDENTITY);
}

static void write_out(const Call *c, Matrix m, const float *lines, i64 pitch) {
    if (c->y)
        transform_to(c, m, lines, pitch);
    else
        differentiate_to(c, m, lines, pitch);
}

// ---- from a channel's sums to its coefficients ----

static void keep(Call *c, i64 channel, double mean, double var) {
    i64 all = c->shape.channels;
    double invstd = 1 / sqrt(var + c->eps), scale = invstd * (c->gamma ? c->gamma[channel] : 1);
    float *kept = c->kept + channel, center = (float)mean;
    kept[CENTER * all] = center;
    kept[SCALE * all] = (float)scale;
    kept[OFFSET * all] = (float)((c->beta ? c->beta[channel] : 0) - (mean - center) * scale);
    kept[INVSTD * all] = (float)invstd;
    kept[LACK * all] = (float)(mean - center);
    c->mean[channel] = mean;
    c->var[channel] = var;
    // A channel is bad if its statistics are infinite, NaN or near overflow. It is also bad if its standard deviation
    // is so small that squared deviations are near underflow, or if gamma / std^2 is so large that the slope of dx is
    // near overflow.
    int good = fabs(mean) < 1e38 && var < 1e38 && invstd < 1e15 && fabs(scale) * invstd < 1e20;
    if (!good) __atomic_store_n(&c->bad, 1, __ATOMIC_RELAXED);
}

// Computes dgamma, dbeta, and the slope and level of dx (Section 3 of the paper). `first` is the channel's sum of dz,
// `second` is its sum of dz * (x - center), and `m` is its number of values.
static void finish(Call *c, i64 channel, double m, double first, double second, float *slope, float *level) {
    i64 all = c->shape.channels;
    const float *kept = c->kept + channel;
    double scale = kept[SCALE * all], invstd = kept[INVSTD * all], lack = kept[LACK * all];
    double dgamma = (second - lack * first) * invstd;
    c->dgamma[channel] = (float)dgamma;
    c->dbeta[channel] = (float)first;
    *slope = (float)(-scale * invstd * dgamma / m);
    *level = (float)(-scale * (first - lack * invstd * dgamma) / m);
}

// ---- tasks and threads ----

typedef struct {
    i64 from, to;
} Range;

// Returns the tasks of the calling thread. A thread's tasks are consecutive, so that threads rarely write to the same
// cache lines. A thread has the same tasks in every pass, so that the tasks' values may still be in its core's cache.
// The number of threads (`team`) is read from OpenMP, which may start fewer threads than requested.
static Range share(const Call *c) {
    i64 thread = 0, team = 1;
    if (c->threads > 1) {
        thread = c->shape.thread();
        team = c->shape.team();
    }
    return (Range){c->tasks * thread / team, c->tasks * (thread + 1) / team};
}

static void run(Call *c, void (*work)(void *), i64 tasks, i64 threads) {
    c->tasks = tasks;
    c->threads = least(threads, tasks);
    if (c->threads > 1)
        c->shape.parallel(work, c, (unsigned)c->threads, 0);
    else
        work(c);
}

// ---- planes ----

// A group of channels is processed as a series of matrices, in which each channel has its own columns. If a plane has
// up to WIDTH values, a matrix row holds the group's planes of one example. A longer plane is divided into matrix rows
// of RUN values (the last row may be shorter); a group then has only one channel.
typedef struct {
    i64 from, here;       // first channel, number of channels
    i64 width, each;      // columns, columns per channel
    i64 pieces, matrices; // matrices per plane if a plane has more than WIDTH values, else 1; matrices of the group
} Group;

static i64 channels_of_group(const Shape *f) { return least(f->channels, 1 + (RUN - 1) / f->length); }

static Group group_of(const Shape *f, i64 task) {
    i64 each = channels_of_group(f), from = task * each;
    Group g = {.from = from, .here = least(each, f->channels - from), .each = f->length, .pieces = 1};
    if (f->length > WIDTH) {
        g.each = RUN;
        g.pieces = (f->length / RUN + ADDED - 1) / ADDED + (f->length % RUN > 0);
        g.matrices = f->n * g.pieces;
    } else
        g.matrices = (f->n + ADDED - 1) / ADDED;
    g.width = g.here * g.each;
    return g;
}

static Matrix matrix_of(const Shape *f, const Group *g, i64 which) {
    i64 example = which / g->pieces, piece = which % g->pieces, stride = f->channels * f->length;
    if (f->length <= WIDTH) {
        example *= ADDED;
        return (Matrix){example * stride + g->from * f->length, least(ADDED, f->n - example), stride, g->width};
    }
    i64 at = example * stride + g->from * f->length + piece * ADDED * RUN, left = f->length / RUN - piece * ADDED;
    if (left > 0) return (Matrix){at, least(ADDED, left), RUN, RUN};
    return (Matrix){at + left * RUN, 1, RUN, f->length % RUN};
}

// Adds the columns' sums (`columns`) to the channels' sums (every second element of `sums`). Then sets `columns` to 0.
static void fold(const Group *g, float *columns, double *sums) {
    for (i64 k = 0; k < g->here; ++k) {
        const float *v = columns + k * g->each;
        double lanes[8] = {0}, rest = 0;
        i64 j = 0;
        for (; j + 8 <= g->each; j += 8)
            for (int i = 0; i < 8; ++i) lanes[i] += v[j + i];
        for (; j < g->each; ++j) rest += v[j];
        for (int i = 0; i < 8; ++i) rest += lanes[i];
        sums[2 * k] += rest;
    }
    memset(columns, 0, g->width * sizeof(float));
}

// The sums of a group. `first` and `second` have one float32 sum per column, and `sums` has two float64 sums per
// channel. To limit rounding errors, `first` and `second` are regularly added to `sums` and then set to zero.
typedef struct {
    float first[WIDTH], second[WIDTH];
    double sums[RUN][2];
    i64 added; // number of matrix rows that `first` and `second` cover
} Sums;

static void clear(Sums *s, const Group *g) {
    memset(s->first, 0, g->width * sizeof(float));
    memset(s->second, 0, g->width * sizeof(float));
    memset(s->sums, 0, g->here * sizeof s->sums[0]);
    s->added = 0;
}

// Must be called after each matrix. Adds the columns' sums to the channels' sums if the columns' sums now cover at
// least ADDED matrix rows, or if this was the last matrix.
static void fold_when_due(Sums *s, const Group *g, i64 rows, int last) {
    s->added += rows;
    if (s->added < ADDED && !last) return;
    fold(g, s->first, &s->sums[0][0]);
    fold(g, s->second, &s->sums[0][1]);
    s->added = 0;
}

static void spread_to(const Group *g, float *columns, i64 channel, float value) {
    for (i64 j = 0; j < g->each; ++j) columns[channel * g->each + j] = value;
}

static void spread_kept(const Call *c, const Group *g, i64 channel, float *lines) {
    const float *kept = c->kept + g->from + channel;
    for (int i = 0; i < 3; ++i) spread_to(g, lines + i * WIDTH, channel, kept[i * c->shape.channels]);
}

static void planes_forward(void *given) {
    Call *c = given;
    const Shape *f = &c->shape;
    double m = (double)f->n * (double)f->length;
    float lines[3 * WIDTH], *rough = lines;
    Sums s;
    Range mine = share(c);
    for (i64 task = mine.from; task < mine.to; ++task) {
        Group g = group_of(f, task);
        clear(&s, &g);
        for (i64 i = 0; i < g.matrices; ++i) {
            Matrix part = matrix_of(f, &g, i);
            add_to(c, part, s.first);
            fold_when_due(&s, &g, part.rows, i + 1 == g.matrices);
        }
        for (i64 k = 0; k < g.here; ++k) spread_to(&g, rough, k, (float)(s.sums[k][0] / m));
        clear(&s, &g);
        for (i64 i = 0; i < g.matrices; ++i) {
            Matrix part = matrix_of(f, &g, i);
            add_squares_to(c, part, rough, s.first, s.second);
            fold_when_due(&s, &g, part.rows, i + 1 == g.matrices);
        }
        for (i64 k = 0; k < g.here; ++k) {
            double mean = rough[k * g.each], d = s.sums[k][0] / m;
            // fmax turns a variance of NaN into 0. But in this case the mean is not finite, so `keep` marks the channel
            // as bad.
            keep(c, g.from + k, mean + d, fmax(s.sums[k][1] / m - d * d, 0));
        }
        for (i64 k = 0; k < g.here; ++k) spread_kept(c, &g, k, lines);
        for (i64 i = 0; i < g.matrices; ++i) write_out(c, matrix_of(f, &g, i), lines, WIDTH);
    }
}

static void planes_backward(void *given) {
    Call *c = given;
    const Shape *f = &c->shape;
    double m = (double)f->n * (double)f->length;
    float lines[LINES * WIDTH];
    Sums s;
    Range mine = share(c);
    for (i64 task = mine.from; task < mine.to; ++task) {
        Group g = group_of(f, task);
        clear(&s, &g);
        for (i64 k = 0; k < g.here; ++k) spread_kept(c, &g, k, lines);
        for (i64 i = 0; i < g.matrices; ++i) {
            Matrix part = matrix_of(f, &g, i);
            reduce_to(c, part, lines, WIDTH, s.first, s.second);
            fold_when_due(&s, &g, part.rows, i + 1 == g.matrices);
        }
        for (i64 k = 0; k < g.here; ++k) {
            float slope, level;
            finish(c, g.from + k, m, s.sums[k][0], s.sums[k][1], &slope, &level);
            spread_to(&g, lines + SLOPE * WIDTH, k, slope);
            spread_to(&g, lines + LEVEL * WIDTH, k, level);
        }
        if (c->dx)
            for (i64 i = 0; i < g.matrices; ++i) write_out(c, matrix_of(f, &g, i), lines, WIDTH);
    }
}

// ---- rows ----

// A block is a matrix of up to c->block rows and c->width columns. If there are few channels, a matrix row holds
// several positions (rows of the tensor), and the last matrix row of the last block may be incomplete.
typedef struct {
    Matrix full, tail; // the complete matrix rows, and the incomplete one (with width 0 if there is none)
    i64 positions;     // number of positions in the whole block
} Block;

static Block block_of(const Call *c, i64 task) {
    i64 each = c->block * c->positions, from = task * each, here = least(each, c->shape.n - from);
    i64 w = c->width, at = from * c->shape.channels, rows = here / c->positions;
    Matrix full = {at, rows, w, w}, tail = {at + rows * w, 1, w, here % c->positions * c->shape.channels};
    return (Block){full, tail, here};
}

// `columns` has one sum per column. If a matrix row holds several positions, adds the sums of the other positions to
// the sums of the first.
static void fold_positions(const Call *c, float *columns) {
    i64 channels = c->shape.channels;
    for (i64 j = channels; j < c->width; j += channels)
        for (i64 k = 0; k < channels; ++k) columns[k] += columns[j + k];
}

static void spread_positions(const Call *c, float *columns) {
    i64 channels = c->shape.channels;
    for (i64 j = channels; j < c->width; j += channels) memcpy(columns + j, columns, channels * sizeof(float));
}

// For each block and channel, computes the rough mean, and the sums of d = x - rough and of d^2.
static void rows_moments(void *given) {
    Call *c = given;
    i64 channels = c->shape.channels, w = c->width;
    float room[3 * WIDTH];
    Range mine = share(c);
    for (i64 task = mine.from; task < mine.to; ++task) {
        Block b = block_of(c, task);
        float *out = c->sums + 3 * w * task, *rough = c->positions > 1 ? room : out;
        float *first = rough + w, *second = first + w;
        memset(rough, 0, 3 * w * sizeof(float));
        add_to(c, b.full, rough);
        add_to(c, b.tail, rough);
        fold_positions(c, rough);
        for (i64 k = 0; k < channels; ++k) rough[k] /= (float)b.positions;
        spread_positions(c, rough);
        add_squares_to(c, b.full, rough, first, second);
        add_squares_to(c, b.tail, rough, first, second);
        if (rough == out) continue;
        fold_positions(c, first);
        fold_positions(c, second);
        for (int i = 0; i < 3; ++i) memcpy(out + i * w, rough + i * w, channels * sizeof(float));
    }
}

static void rows_write(void *given) {
    Call *c = given;
    Range mine = share(c);
    for (i64 task = mine.from; task < mine.to; ++task) {
        Block b = block_of(c, task);
        write_out(c, b.full, c->lines, c->width);
        write_out(c, b.tail, c->lines, c->width);
    }
}

static void rows_reduce(void *given) {
    Call *c = given;
    i64 channels = c->shape.channels, w = c->width;
    float room[2 * WIDTH];
    Range mine = share(c);
    for (i64 task = mine.from; task < mine.to; ++task) {
        Block b = block_of(c, task);
        float *out = c->sums + 2 * w * task, *first = c->positions > 1 ? room : out, *second = first + w;
        memset(first, 0, 2 * w * sizeof(float));
        reduce_to(c, b.full, c->lines, w, first, second);
        reduce_to(c, b.tail, c->lines, w, first, second);
        if (first == out) continue;
        fold_positions(c, first);
        fold_positions(c, second);
        for (int i = 0; i < 2; ++i) memcpy(out + i * w, first + i * w, channels * sizeof(float));
    }
}

// Sets c->positions, c->width and c->block, and returns the number of blocks.
static i64 divide(Call *c) {
    i64 channels = c->shape.channels;
    // If there are fewer than NARROW channels, put several positions into a matrix row. The number of columns must then
    // be at least NARROW and a multiple of 16, so that a row fills whole SIMD vectors.
    c->positions = 1;
    while (channels < NARROW && (c->positions * channels < NARROW || c->positions * channels % 16)) ++c->positions;
    c->width = c->positions * channels;
    c->block = least(BLOCK, c->shape.n * channels / TASKS) / c->width;
    if (c->block < ROWS) c->block = ROWS;
    i64 each = c->block * c->positions;
    return (c->shape.n + each - 1) / each;
}

static void spread_lines(const Call *c) {
    for (int i = 0; i < 3; ++i) {
        float *columns = c->lines + i * c->width;
        memcpy(columns, c->kept + i * c->shape.channels, c->shape.channels * sizeof(float));
        spread_positions(c, columns);
    }
}

static int rows_forward(Call *c, i64 threads) {
    i64 channels = c->shape.channels, blocks = divide(c);
    c->lines = malloc(3 * (1 + blocks) * c->width * sizeof(float));
    if (!c->lines) return -1;
    c->sums = c->lines + 3 * c->width;
    run(c, rows_moments, blocks, threads);
    double *restrict mean = c->mean, *restrict var = c->var, m = (double)c->shape.n;
    memset(mean, 0, channels * sizeof(double));
    memset(var, 0, channels * sizeof(double));
    for (i64 b = 0; b < blocks; ++b) {
        const float *rough = c->sums + 3 * c->width * b, *first = rough + c->width;
        double count = (double)block_of(c, b).positions;
        for (i64 k = 0; k < channels; ++k) mean[k] += count * rough[k] + first[k];
    }
    for (i64 k = 0; k < channels; ++k) mean[k] /= m;
    for (i64 b = 0; b < blocks; ++b) {
        const float *rough = c->sums + 3 * c->width * b, *first = rough + c->width, *second = first + c->width;
        double count = (double)block_of(c, b).positions;
        for (i64 k = 0; k < channels; ++k) {
            double d = rough[k] - mean[k]; // the next line adds the sum of (x - mean)^2 = (x - rough + d)^2
            var[k] += second[k] + d * (2 * (double)first[k] + count * d);
        }
    }
    for (i64 k = 0; k < channels; ++k) keep(c, k, mean[k], fmax(var[k] / m, 0));
    if (!c->bad) {
        spread_lines(c);
        run(c, rows_write, blocks, threads);
    }
    free(c->lines);
    return 0;
}

static int rows_backward(Call *c, i64 threads) {
    i64 channels = c->shape.channels, blocks = divide(c);
    double *sums = malloc(2 * channels * sizeof(double) + (LINES + 2 * blocks) * c->width * sizeof(float));
    if (!sums) return -1;
    double *restrict first = sums, *restrict second = sums + channels;
    memset(sums, 0, 2 * channels * sizeof(double));
    c->lines = (float *)(sums + 2 * channels);
    c->sums = c->lines + LINES * c->width;
    spread_lines(c);
    run(c, rows_reduce, blocks, threads);
    for (i64 b = 0; b < blocks; ++b) {
        const float *of_block = c->sums + 2 * c->width * b;
        for (i64 k = 0; k < channels; ++k) {
            first[k] += of_block[k];
            second[k] += of_block[c->width + k];
        }
    }
    float *slope = c->lines + SLOPE * c->width, *level = c->lines + LEVEL * c->width;
    for (i64 k = 0; k < channels; ++k) finish(c, k, (double)c->shape.n, first[k], second[k], slope + k, level + k);
    spread_positions(c, slope);
    spread_positions(c, level);
    if (c->dx) run(c, rows_write, blocks, threads);
    free(sums);
    return 0;
}

// ---- called from Python ----

// Returns a copy of the given shape. For rows with many channels and small n, the copy's `length` is 1, so that each
// value is a plane.
static Shape shape_of(const Shape *given) {
    Shape f = *given;
    if (!f.length && f.channels >= WIDTH && f.n <= ADDED) f.length = 1;
    return f;
}

static i64 groups_of(const Shape *f) { return (f->channels + channels_of_group(f) - 1) / channels_of_group(f); }

// Writes y and kept. If `passed` is not null, there must be a residual, and g must be ReLU, leaky ReLU or ReLU6;
// `passed` is then written too. If `running_mean` is not null, updates the running averages and increments `batches`; a
// momentum of NaN means a cumulative average. Returns 0 on success, 1 if a channel is bad (see keep), and -1 if out of
// memory. If the result is not 0, the averages are unchanged, and y, kept and passed are undefined.
int forward(
    const Shape *given, i64 threads, double eps, double momentum, const float *x, const float *gamma, const float *beta,
    const float *residual, float *running_mean, float *running_var, i64 *batches, float *y, unsigned char *passed,
    float *kept) {
    Call c = {.shape = shape_of(given), .x = x, .gamma = gamma, .beta = beta, .y = y, .kept = kept, .eps = eps};
    c.residual = residual, c.passed = passed;
    i64 channels = given->channels;
    c.mean = malloc(2 * channels * sizeof(double));
    if (!c.mean) return -1;
    c.var = c.mean + channels;
    int failed = 0;
    if (c.shape.length)
        run(&c, planes_forward, groups_of(&c.shape), threads);
    else
        failed = rows_forward(&c, threads);
    if (!failed && !c.bad && running_mean) {
        double m = (double)c.shape.n * (double)(c.shape.length ? c.shape.length : 1);
        double factor = isnan(momentum) ? 1 / (double)(*batches + 1) : momentum;
        for (i64 k = 0; k < channels; ++k) {
            double mean = running_mean[k], var = running_var[k];
            running_mean[k] = (float)(mean + factor * (c.mean[k] - mean));
            running_var[k] = (float)(var + factor * (c.var[k] * (m / (m - 1)) - var));
        }
        ++*batches;
    }
    free(c.mean);
    return failed ? failed : c.bad;
}

// Writes the gradients of gamma and beta and, if `dx` is not null, dx. If `passed` is not null or g' takes more than
// two values, also writes dz; `dz` must then not be null, and may be the same memory as `dx`. Otherwise, `dz` must be
// null. Returns 0 on success, and -1 if out of memory.
int backward(
    const Shape *given, i64 threads, const float *x, const float *dy, const float *residual, unsigned char *passed,
    const float *kept, float *dx, float *dz, float *dgamma, float *dbeta) {
    Call c = {.shape = shape_of(given), .x = x, .dy = dy, .residual = residual, .kept = (float *)kept};
    c.passed = passed, c.dx = dx, c.dz = dz, c.dgamma = dgamma, c.dbeta = dbeta;
    if (!c.shape.length) return rows_backward(&c, threads);
    run(&c, planes_backward, groups_of(&c.shape), threads);
    return 0;
}
