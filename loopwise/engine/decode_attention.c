/* Attention of rows over keys and values that lie in pages.

   A few tokens at a time, straight from where they lie, for all rows that read them: gathering them
   first moves three times the memory, and at small widths that is most of a decode step. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* exp(x) for x <= 0, to about 2e-7 of its value; a polynomial, so that loops over it vectorise. */
INLINE float exp_below_zero(float x) {
    if (x < -87.0f) x = -87.0f;
    float whole = rintf(x * 1.44269504f);
    float rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * rest + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * rest * rest + rest + 1.0f;
    int32_t bits = ((int32_t)whole + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

/* float32 values from bfloat16 ones, and back, to the nearest and of two nearest to the even one. */
INLINE void widen(const uint16_t *narrow, float *wide, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)narrow[i] << 16;
        memcpy(wide + i, &bits, sizeof bits);
    }
}

INLINE void narrow_down(const float *wide, uint16_t *narrow, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, wide + i, sizeof bits);
        uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        narrow[i] = (uint16_t)(wide[i] != wide[i] ? 0x7fc0 : rounded);
    }
}

#define TILE 32  /* tokens that are widened together */
#define ASKED 32 /* queries that go over them together */

/* Tokens `read[0 .. n]` of one key head as float32, `(n, dim)`; an entry holds `width` values, of
   which this head's begin at `head`. The next tile is fetched meanwhile: tokens lie apart. */
INLINE void gather(const void *pool, const int64_t *read, int64_t n, int64_t next, int64_t width,
                   int64_t head, int64_t dim, int bf16, float *tile) {
    for (int64_t t = 0; t < n; t++) {
        const int64_t at = read[t] * width + head, size = bf16 ? 2 : 4;
        if (t < next) {
            const char *ahead = (const char *)pool + (read[t + n] * width + head) * size;
            for (int64_t byte = 0; byte < dim * size; byte += 64) __builtin_prefetch(ahead + byte);
        }
        if (bf16) widen((const uint16_t *)pool + at, tile + t * dim, dim);
        else memcpy(tile + t * dim, (const float *)pool + at, sizeof(float) * (size_t)dim);
    }
}

/* `rows` rows of `shared` query heads over one key head. Row i reads the tokens `from[i] .. to[i]` of
   `read`. q, out: (rows, shared, dim). `weight` holds rows x shared x the tokens from the first to the last
   that any of them reads, `tile` TILE x dim. */
INLINE void attend_one(const float *q, float *out, const void *keys, const void *values,
                       const int64_t *read, const int64_t *from, const int64_t *to, int64_t rows,
                       int64_t width, int64_t head, int64_t shared, int64_t dim, int bf16,
                       float *weight, float *tile) {
    const float scale = 1.0f / sqrtf((float)dim);
    int64_t first = from[0], end = to[0];
    for (int64_t i = 1; i < rows; i++) {
        first = from[i] < first ? from[i] : first;
        end = to[i] > end ? to[i] : end;
    }
    const int64_t n = end - first;
    for (int64_t at = first; at < end; at += TILE) {
        const int64_t here = end - at < TILE ? end - at : TILE, left = end - at - here;
        gather(keys, read + at, here, left < here ? left : here, width, head, dim, bf16, tile);
        for (int64_t i = 0; i < rows * shared; i++) {
            const int64_t row = i / shared, last = to[row] < at + here ? to[row] : at + here;
            for (int64_t t = from[row] > at ? from[row] : at; t < last; t++) {
                const float *key = tile + (t - at) * dim;
                float dot = 0.0f;
                for (int64_t d = 0; d < dim; d++) dot += q[i * dim + d] * key[d];
                weight[i * n + t - first] = dot * scale;
            }
        }
    }
    for (int64_t i = 0; i < rows * shared; i++) {
        const int64_t many = to[i / shared] - from[i / shared];
        float *w = weight + i * n + from[i / shared] - first;
        float highest = w[0], total = 0.0f;
        for (int64_t t = 1; t < many; t++) highest = w[t] > highest ? w[t] : highest;
        for (int64_t t = 0; t < many; t++) w[t] = exp_below_zero(w[t] - highest);
        for (int64_t t = 0; t < many; t++) total += w[t];
        const float part = 1.0f / total;
        for (int64_t t = 0; t < many; t++) w[t] *= part;
    }
    memset(out, 0, sizeof(float) * (size_t)(rows * shared * dim));
    for (int64_t at = first; at < end; at += TILE) {
        const int64_t here = end - at < TILE ? end - at : TILE, left = end - at - here;
        gather(values, read + at, here, left < here ? left : here, width, head, dim, bf16, tile);
        for (int64_t i = 0; i < rows * shared; i++) {
            const int64_t row = i / shared, last = to[row] < at + here ? to[row] : at + here;
            float *made = out + i * dim;
            for (int64_t t = from[row] > at ? from[row] : at; t < last; t++) {
                const float *value = tile + (t - at) * dim, w = weight[i * n + t - first];
                for (int64_t d = 0; d < dim; d++) made[d] += w * value[d];
            }
        }
    }
}

/* Usual head sizes are known to the compiler, so that their loops unroll into registers. */
INLINE void attend_any(const float *q, float *out, const void *keys, const void *values,
                       const int64_t *read, const int64_t *from, const int64_t *to, int64_t rows,
                       int64_t width, int64_t head, int64_t shared, int64_t dim, int bf16,
                       float *weight, float *tile) {
#define OF(D)                                                                                  \
    attend_one(q, out, keys, values, read, from, to, rows, width, head, shared, D, bf16, weight, \
               tile)
    switch (dim) {
        case 32: OF(32); break;
        case 64: OF(64); break;
        case 128: OF(128); break;
        default: OF(dim);
    }
#undef OF
}

/* Some rows of one run and one key head of theirs. */
typedef struct {
    int64_t run, row, rows, head;
} Task;

/* Writes the entries of `rows` rows into the pools, then attends for the first of them.

   All values are bfloat16 or all float32. q: (rows, n_kv, shared, dim), out alike; k, v: (rows,
   n_kv, dim); each row contiguous, `*_step` values from one row to the next. keys, values: (entries,
   n_kv, dim). written: (rows,), entries. Those come in runs that read the same entries: sizes:
   (runs,), rows of each; read: (runs, seen), entries; row i reads from[i] .. to[i] of those of its
   run, at least one. Returns 0, or 1 where memory ran out. */
int decode_attention(const void *q, int64_t q_step, const void *k, int64_t k_step, const void *v,
                     int64_t v_step, void *out, void *keys, void *values, int bf16,
                     const int64_t *written, const int64_t *read, const int64_t *sizes,
                     const int64_t *from, const int64_t *to, int64_t rows, int64_t runs,
                     int64_t n_kv, int64_t shared, int64_t dim, int64_t seen, int threads) {
    const int64_t width = n_kv * dim, size = bf16 ? 2 : 4, asked = shared * dim;
    const int64_t most = shared < ASKED ? ASKED / shared : 1;
    Task *tasks = malloc(sizeof(Task) * (size_t)(rows * n_kv));
    if (!tasks) return 1;
    int64_t n_tasks = 0, widest = 0;
    for (int64_t run = 0, row = 0; run < runs; run++) {
        for (const int64_t end = row + sizes[run]; row < end;) {
            const int64_t part = end - row < most ? end - row : most;
            for (int64_t head = 0; head < n_kv; head++)
                tasks[n_tasks++] = (Task){run, row, part, head};
            row += part;
            widest = part > widest ? part : widest;
        }
    }
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *tile = malloc(sizeof(float) * (size_t)(TILE * dim + widest * (2 * asked + shared * seen)));
        if (!tile)
#pragma omp atomic write
            failed = 1;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            char *key = (char *)keys + written[row] * width * size;
            char *value = (char *)values + written[row] * width * size;
            memcpy(key, (const char *)k + row * k_step * size, (size_t)(width * size));
            memcpy(value, (const char *)v + row * v_step * size, (size_t)(width * size));
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < n_tasks; i++) {
            if (!tile) continue;
            const Task task = tasks[i];
            float *mine = tile + TILE * dim, *made = mine + widest * asked;
            for (int64_t j = 0; j < task.rows; j++) {
                const int64_t at = (task.row + j) * q_step + task.head * asked;
                if (bf16) widen((const uint16_t *)q + at, mine + j * asked, asked);
                else memcpy(mine + j * asked, (const float *)q + at, sizeof(float) * (size_t)asked);
            }
            const int64_t *which = read + task.run * seen, *begin = from + task.row;
            float *weight = made + widest * asked;
            if (bf16)
                attend_any(mine, made, keys, values, which, begin, to + task.row, task.rows, width,
                           task.head * dim, shared, dim, 1, weight, tile);
            else
                attend_any(mine, made, keys, values, which, begin, to + task.row, task.rows, width,
                           task.head * dim, shared, dim, 0, weight, tile);
            for (int64_t j = 0; j < task.rows; j++) {
                const int64_t at = ((task.row + j) * n_kv + task.head) * asked;
                if (bf16) narrow_down(made + j * asked, (uint16_t *)out + at, asked);
                else memcpy((float *)out + at, made + j * asked, sizeof(float) * (size_t)asked);
            }
        }
        free(tile);
    }
    free(tasks);
    return failed;
}
