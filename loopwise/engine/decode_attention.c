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

/* One row of a pool as float32: in place, or widened from bfloat16 into `room`. */
INLINE const float *row_of(const void *pool, int64_t at, int64_t dim, int bf16, float *room) {
    if (!bf16) return (const float *)pool + at * dim;
    const uint16_t *narrow = (const uint16_t *)pool + at * dim;
    for (int64_t d = 0; d < dim; d++) {
        uint32_t bits = (uint32_t)narrow[d] << 16;
        memcpy(room + d, &bits, sizeof bits);
    }
    return room;
}

#define AHEAD 16 /* tokens: pages end where the hardware's own prefetching stops */

INLINE void fetch(const void *pool, int64_t at, int64_t dim, int bf16) {
    const char *row = (const char *)pool + at * dim * (bf16 ? 2 : 4);
    for (int64_t byte = 0; byte < dim * (bf16 ? 2 : 4); byte += 64) __builtin_prefetch(row + byte);
}

/* `shared` query heads over one key head; `weight` holds shared x n, `room` dim. */
INLINE void attend_one(const float *q, float *out, const void *keys, const void *values,
                       const int64_t *read, int64_t n, int64_t shared, int64_t dim, int bf16,
                       float *weight, float *room) {
    const float scale = 1.0f / sqrtf((float)dim);
    for (int64_t t = 0; t < n; t++) {
        if (t + AHEAD < n) fetch(keys, read[t + AHEAD], dim, bf16);
        const float *key = row_of(keys, read[t], dim, bf16, room);
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
        if (t + AHEAD < n) fetch(values, read[t + AHEAD], dim, bf16);
        const float *value = row_of(values, read[t], dim, bf16, room);
        for (int64_t h = 0; h < shared; h++) {
            const float w = weight[h * n + t];
            for (int64_t d = 0; d < dim; d++) out[h * dim + d] += w * value[d];
        }
    }
}

/* Usual head sizes are known to the compiler, so that their loops unroll into registers. */
INLINE void attend_any(const float *q, float *out, const void *keys, const void *values,
                       const int64_t *read, int64_t n, int64_t shared, int64_t dim, int bf16,
                       float *weight, float *room) {
#define OF(D) attend_one(q, out, keys, values, read, n, shared, D, bf16, weight, room)
    switch (dim) {
        case 32: OF(32); break;
        case 64: OF(64); break;
        case 128: OF(128); break;
        default: OF(dim);
    }
#undef OF
}

/* q, out: (rows, n_kv, shared, dim) float32. keys, values: (heads of entries, dim), float32 or
   bfloat16. read: (rows, n_kv, seen), which head of which entry. bias: (rows, seen), 0 or -inf; the
   places a row may not read come last. Returns 0, or 1 where memory ran out. */
int decode_attention(const float *q, float *out, const void *keys, const void *values, int bf16,
                     const int64_t *read, const float *bias, int64_t rows, int64_t n_kv,
                     int64_t shared, int64_t dim, int64_t seen, int threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *weight = malloc(sizeof(float) * (size_t)(shared * seen + dim));
        if (!weight) failed = 1;
#pragma omp for schedule(static)
        for (int64_t task = 0; task < rows * n_kv; task++) {
            if (!weight) continue;
            const float *allowed = bias + task / n_kv * seen;
            int64_t n = seen, at = task * shared * dim;
            while (n > 1 && allowed[n - 1] < 0.0f) n--;
            float *room = weight + shared * seen;
            const int64_t *from = read + task * seen;
            if (bf16)
                attend_any(q + at, out + at, keys, values, from, n, shared, dim, 1, weight, room);
            else
                attend_any(q + at, out + at, keys, values, from, n, shared, dim, 0, weight, room);
        }
        free(weight);
    }
    return failed;
}
