/* Attention of single rows over keys and values that lie in pages.

   One pass over what a row may read, straight from where it lies: gathering it first moves three
   times the memory, and at small widths that is most of a decode step. */

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

/* `n` float32 values: in place, or widened into `room`. */
INLINE const float *as_float(const void *values, int64_t at, int64_t n, int bf16, float *room) {
    if (!bf16) return (const float *)values + at;
    widen((const uint16_t *)values + at, room, n);
    return room;
}

#define AHEAD 16 /* tokens: pages end where the hardware's own prefetching stops */

INLINE void fetch(const void *pool, int64_t at, int64_t dim, int bf16) {
    const char *row = (const char *)pool + at * (bf16 ? 2 : 4);
    for (int64_t byte = 0; byte < dim * (bf16 ? 2 : 4); byte += 64) __builtin_prefetch(row + byte);
}

/* `shared` query heads over one key head of the entries `read[0 .. n]`; an entry holds `width`
   values, of which this head's begin at `head`. `weight` holds shared x n, `room` dim. */
INLINE void attend_one(const float *q, float *out, const void *keys, const void *values,
                       const int64_t *read, int64_t n, int64_t width, int64_t head, int64_t shared,
                       int64_t dim, int bf16, float *weight, float *room) {
    const float scale = 1.0f / sqrtf((float)dim);
    for (int64_t t = 0; t < n; t++) {
        if (t + AHEAD < n) fetch(keys, read[t + AHEAD] * width + head, dim, bf16);
        const float *key = as_float(keys, read[t] * width + head, dim, bf16, room);
        for (int64_t h = 0; h < shared; h++) {
            float dot = 0.0f;
            for (int64_t d = 0; d < dim; d++) dot += q[h * dim + d] * key[d];
            weight[h * n + t] = dot * scale;
        }
    }
    for (int64_t h = 0; h < shared; h++) {
        float *w = weight + h * n;
        float highest = w[0], total = 0.0f;
        for (int64_t t = 1; t < n; t++) highest = w[t] > highest ? w[t] : highest;
        for (int64_t t = 0; t < n; t++) w[t] = exp_below_zero(w[t] - highest);
        for (int64_t t = 0; t < n; t++) total += w[t];
        const float part = 1.0f / total;
        for (int64_t t = 0; t < n; t++) w[t] *= part;
    }
    memset(out, 0, sizeof(float) * (size_t)(shared * dim));
    for (int64_t t = 0; t < n; t++) {
        if (t + AHEAD < n) fetch(values, read[t + AHEAD] * width + head, dim, bf16);
        const float *value = as_float(values, read[t] * width + head, dim, bf16, room);
        for (int64_t h = 0; h < shared; h++) {
            const float w = weight[h * n + t];
            for (int64_t d = 0; d < dim; d++) out[h * dim + d] += w * value[d];
        }
    }
}

/* Usual head sizes are known to the compiler, so that their loops unroll into registers. */
INLINE void attend_any(const float *q, float *out, const void *keys, const void *values,
                       const int64_t *read, int64_t n, int64_t width, int64_t head, int64_t shared,
                       int64_t dim, int bf16, float *weight, float *room) {
#define OF(D) attend_one(q, out, keys, values, read, n, width, head, shared, D, bf16, weight, room)
    switch (dim) {
        case 32: OF(32); break;
        case 64: OF(64); break;
        case 128: OF(128); break;
        default: OF(dim);
    }
#undef OF
}

/* Writes the entries of `rows` rows into the pools, then attends for the first `singles` of them.

   All values are bfloat16 or all float32. q: (rows, n_kv, shared, dim), out alike; k, v: (rows,
   n_kv, dim); each row contiguous, `*_step` values from one row to the next. keys, values: (entries,
   n_kv, dim). written: (rows,), entries. read: (singles, seen), entries, of which a row reads the
   first `lengths` of it. Returns 0, or 1 where memory ran out. */
int decode_attention(const void *q, int64_t q_step, const void *k, int64_t k_step, const void *v,
                     int64_t v_step, void *out, void *keys, void *values, int bf16,
                     const int64_t *written, int64_t rows, const int64_t *read,
                     const int64_t *lengths, int64_t singles, int64_t n_kv, int64_t shared,
                     int64_t dim, int64_t seen, int threads) {
    int failed = 0;
    const int64_t width = n_kv * dim, size = bf16 ? 2 : 4, asked = shared * dim;
#pragma omp parallel num_threads(threads)
    {
        float *weight = malloc(sizeof(float) * (size_t)(shared * seen + dim + 2 * asked));
        if (!weight) failed = 1;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            char *key = (char *)keys + written[row] * width * size;
            char *value = (char *)values + written[row] * width * size;
            memcpy(key, (const char *)k + row * k_step * size, (size_t)(width * size));
            memcpy(value, (const char *)v + row * v_step * size, (size_t)(width * size));
        }
#pragma omp for schedule(static)
        for (int64_t task = 0; task < singles * n_kv; task++) {
            if (!weight) continue;
            const int64_t row = task / n_kv, head = task % n_kv, n = lengths[row];
            const int64_t *from = read + row * seen;
            float *room = weight + shared * seen, *mine = room + dim, *made = mine + asked;
            const int64_t at = row * q_step + head * asked;
            if (bf16) {
                widen((const uint16_t *)q + at, mine, asked);
                attend_any(mine, made, keys, values, from, n, width, head * dim, shared, dim, 1,
                           weight, room);
                narrow_down(made, (uint16_t *)out + task * asked, asked);
            } else {
                attend_any((const float *)q + at, (float *)out + task * asked, keys, values, from,
                           n, width, head * dim, shared, dim, 0, weight, room);
            }
        }
        free(weight);
    }
    return failed;
}
