// SPDX-License-Identifier: Apache-2.0
// float32 CPU kernels of provider `native`. vllmx/kernels/native_library.py compiles this file once
// per machine; vllmx/kernels/native_ops.py says what each function means (its op's docstring).
// Strides are in elements. A loop is shared between threads only where it is worth their start.

#include <math.h>
#include <stdint.h>
#include <string.h>

#define WORTH_THREADS 65536  // elements; below, one thread is done before a second has begun
#define MAX_HEAD_SIZE 512
#define TILE 256  // keys scored at a time, at most

#ifdef _OPENMP
#include <omp.h>
int native_max_threads(void) { return omp_get_max_threads(); }
#else
int native_max_threads(void) { return 0; }
#endif

// exp(x) to 2 ulp between -87 and 88, 0 and infinity outside: 2^n * e^r with |r| <= ln(2) / 2. libm's is a call per element.
static inline float fast_exp(float x) {
  const float y = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);  // a NaN passes
  const float n = rintf(y * 1.44269504f);
  const float r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = ((int32_t)n + 127) << 23;
  float scale;
  memcpy(&scale, &bits, sizeof scale);
  return x < -87.0f ? 0.0f : (x > 88.0f ? INFINITY : p * scale);
}

#define SUM_BLOCK 256

// residual, weight: may be null. The residual becomes x + residual.
void native_rms_norm(const float *x, int64_t x_stride, float *residual, int64_t residual_stride,
                     const float *weight, float *out, int64_t rows, int64_t hidden,
                     float epsilon) {
#pragma omp parallel for if (rows * hidden > WORTH_THREADS)
  for (int64_t row = 0; row < rows; row++) {
    const float *in = x + row * x_stride;
    float *to = out + row * hidden;
    double squares = 0;
    if (residual) {
      float *sum = residual + row * residual_stride;
#pragma omp simd
      for (int64_t i = 0; i < hidden; i++) sum[i] += in[i];
      in = sum;
    }
    // One rounding of the scale moves the whole row: wide sums of short narrow ones.
    for (int64_t start = 0; start < hidden; start += SUM_BLOCK) {
      const int64_t end = start + SUM_BLOCK < hidden ? start + SUM_BLOCK : hidden;
      float part = 0;
#pragma omp simd reduction(+ : part)
      for (int64_t i = start; i < end; i++) part += in[i] * in[i];
      squares += part;
    }
    const float scale = (float)(1.0 / sqrt(squares / (double)hidden + (double)epsilon));
    if (weight) {
#pragma omp simd
      for (int64_t i = 0; i < hidden; i++) to[i] = in[i] * scale * weight[i];
    } else {
#pragma omp simd
      for (int64_t i = 0; i < hidden; i++) to[i] = in[i] * scale;
    }
  }
}

void native_silu_and_mul(const float *x, int64_t x_stride, float *out, int64_t rows,
                         int64_t half) {
#pragma omp parallel for if (rows * half > WORTH_THREADS)
  for (int64_t row = 0; row < rows; row++) {
    const float *gate = x + row * x_stride, *up = gate + half;
    float *to = out + row * half;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) to[i] = gate[i] / (1.0f + fast_exp(-gate[i])) * up[i];
  }
}

// The tanh form of gelu: (1 + tanh(u)) / 2 = 1 / (1 + e^(-2 u)), where nothing cancels.
void native_gelu_tanh_and_mul(const float *x, int64_t x_stride, float *out, int64_t rows,
                              int64_t half) {
#pragma omp parallel for if (rows * half > WORTH_THREADS)
  for (int64_t row = 0; row < rows; row++) {
    const float *gate = x + row * x_stride, *up = gate + half;
    float *to = out + row * half;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
      const float g = gate[i];
      const float u = 0.7978845608f * (g + 0.044715f * g * g * g);
      to[i] = g / (1.0f + fast_exp(-2.0f * u)) * up[i];
    }
  }
}

// table: [positions, rotary_dim], cosines then sines. Halves (NeoX) or neighbours are paired.
void native_rotary(const int64_t *positions, const float *table, const float *x, int64_t x_stride,
                   float *out, int64_t rows, int64_t heads, int64_t head_size,
                   int64_t rotary_dim, int neox) {
  const int64_t half = rotary_dim / 2;
#pragma omp parallel for if (rows * heads * head_size > WORTH_THREADS)
  for (int64_t row = 0; row < rows; row++) {
    const float *cosines = table + positions[row] * rotary_dim, *sines = cosines + half;
    for (int64_t head = 0; head < heads; head++) {
      const float *in = x + row * x_stride + head * head_size;
      float *to = out + (row * heads + head) * head_size;
      if (neox) {
#pragma omp simd
        for (int64_t i = 0; i < half; i++) {
          const float first = in[i], second = in[half + i];
          to[i] = first * cosines[i] - second * sines[i];
          to[half + i] = second * cosines[i] + first * sines[i];
        }
      } else {
        for (int64_t i = 0; i < half; i++) {
          const float first = in[2 * i], second = in[2 * i + 1];
          to[2 * i] = first * cosines[i] - second * sines[i];
          to[2 * i + 1] = second * cosines[i] + first * sines[i];
        }
      }
      if (rotary_dim < head_size)
        memcpy(to + rotary_dim, in + rotary_dim, (head_size - rotary_dim) * sizeof(float));
    }
  }
}

// A slot lies its cache's slot stride after the one before it; within one, all lies side by side.
void native_reshape_and_cache(const float *key, int64_t key_stride, const float *value,
                              int64_t value_stride, float *key_cache, int64_t key_slot_stride,
                              float *value_cache, int64_t value_slot_stride,
                              const int64_t *slot_mapping, int64_t tokens, int64_t size) {
  for (int64_t token = 0; token < tokens; token++) {
    const int64_t slot = slot_mapping[token];
    if (slot < 0) continue;
    memcpy(key_cache + slot * key_slot_stride, key + token * key_stride, size * sizeof(float));
    memcpy(value_cache + slot * value_slot_stride, value + token * value_stride,
           size * sizeof(float));
  }
}

// One query head over the keys first..end of a request, at most a block at a time, softmax on the way.
static void attend(const float *query, const float *key_cache, int64_t key_slot_stride,
                   const float *value_cache, int64_t value_slot_stride, const int32_t *blocks, int64_t block_size, int64_t first,
                   int64_t end, int64_t head_size, float scale, float soft_cap, float *out) {
  float sums[MAX_HEAD_SIZE], scores[TILE];
  float highest = -INFINITY, total = 0;
  memset(sums, 0, head_size * sizeof(float));
  for (int64_t start = first; start < end;) {
    const int64_t inside = start % block_size;
    int64_t count = block_size - inside;
    if (count > end - start) count = end - start;
    if (count > TILE) count = TILE;
    const int64_t slot = (int64_t)blocks[start / block_size] * block_size + inside;
    const float *keys = key_cache + slot * key_slot_stride;
    const float *values = value_cache + slot * value_slot_stride;
    float block_highest = highest;
    for (int64_t t = 0; t < count; t++) {
      const float *key = keys + t * key_slot_stride;
      float dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t i = 0; i < head_size; i++) dot += query[i] * key[i];
      dot *= scale;
      if (soft_cap > 0) dot = soft_cap * tanhf(dot / soft_cap);
      scores[t] = dot;
      block_highest = dot > block_highest ? dot : block_highest;
    }
    const float shrink = fast_exp(highest - block_highest);
    if (shrink != 1.0f) {
      total *= shrink;
#pragma omp simd
      for (int64_t i = 0; i < head_size; i++) sums[i] *= shrink;
    }
    highest = block_highest;
#pragma omp simd reduction(+ : total)
    for (int64_t t = 0; t < count; t++) {
      scores[t] = fast_exp(scores[t] - highest);
      total += scores[t];
    }
    for (int64_t t = 0; t < count; t++) {
      const float *value = values + t * value_slot_stride;
      const float weight = scores[t];
#pragma omp simd
      for (int64_t i = 0; i < head_size; i++) sums[i] += weight * value[i];
    }
    start += count;
  }
  const float inverse = 1.0f / total;
#pragma omp simd
  for (int64_t i = 0; i < head_size; i++) out[i] = sums[i] * inverse;
}

// Requests of one new token each: row r of query is the last token of request r.
// window, soft_cap: 0 where there is none. longest: the longest of seq_lens.
void native_paged_decode(const float *query, int64_t query_stride, const float *key_cache,
                         int64_t key_slot_stride, const float *value_cache,
                         int64_t value_slot_stride, const int32_t *block_table,
                         int64_t table_stride,
                         const int32_t *seq_lens, int64_t longest, int64_t requests,
                         int64_t kv_heads, int64_t group, int64_t head_size, int64_t block_size,
                         int64_t window, float scale, float soft_cap, float *out) {
#pragma omp parallel for schedule(dynamic) \
    if (requests * kv_heads * group * longest * head_size > 2 * WORTH_THREADS)
  for (int64_t part = 0; part < requests * kv_heads; part++) {
    const int64_t request = part / kv_heads, kv_head = part % kv_heads;
    const int64_t end = seq_lens[request];
    const int64_t first = window > 0 && end > window ? end - window : 0;
    for (int64_t g = 0; g < group; g++) {
      const int64_t head = kv_head * group + g;
      attend(query + request * query_stride + head * head_size, key_cache + kv_head * head_size,
             key_slot_stride, value_cache + kv_head * head_size, value_slot_stride,
             block_table + request * table_stride, block_size, first, end, head_size, scale,
             soft_cap,
             out + (request * kv_heads * group + head) * head_size);
    }
  }
}
