// Sixteen lanes at a time, whatever the instruction set: one strip of a packed matrix is 16 columns
// wide everywhere. GCC's and Clang's vector types become the widest registers the file is compiled for;
// the few conversions they do not know are spelled out.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512BF16__)
#define DF_DOT_BF16 1
#else
#define DF_DOT_BF16 0
#endif

#define DF_INLINE static inline __attribute__((always_inline))

typedef float f16x __attribute__((vector_size(64)));
typedef int32_t i16x __attribute__((vector_size(64)));
typedef uint32_t u16x __attribute__((vector_size(64)));
typedef uint16_t h16x __attribute__((vector_size(32)));
typedef int16_t s16x __attribute__((vector_size(32)));
typedef int8_t b16x __attribute__((vector_size(16)));
typedef uint8_t ub16x __attribute__((vector_size(16)));

template <class V> DF_INLINE V load(const void *from) {
    V v;
    memcpy(&v, from, sizeof v);
    return v;
}
template <class V> DF_INLINE void store(void *to, V v) { memcpy(to, &v, sizeof v); }
DF_INLINE f16x zeros() { return f16x{}; }
DF_INLINE f16x all(float x) { return x - f16x{}; }
DF_INLINE f16x as_float(u16x v) { return (f16x)v; }

DF_INLINE uint16_t to_bf16(float x) {  // to nearest, ties to even; NaN stays NaN
    uint32_t u;
    memcpy(&u, &x, 4);
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
DF_INLINE float from_bf16(uint16_t x) {
    uint32_t u = (uint32_t)x << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
DF_INLINE float from_f16(uint16_t x) {
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, exponent = x >> 10 & 31, fraction = x & 1023, u;
    if (exponent == 0) {
        float f = ldexpf((float)fraction, -24);
        return sign ? -f : f;
    }
    u = exponent == 31 ? 0x7f800000 | fraction << 13 : (exponent + 112) << 23 | fraction << 13;
    u |= sign;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
DF_INLINE f16x load_f16(const uint16_t *from) {
#if defined(__AVX512F__)
    return (f16x)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__)
    f16x v;
    __m256 a = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
    __m256 b = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 8)));
    memcpy(&v, &a, 32);
    memcpy((char *)&v + 32, &b, 32);
    return v;
#else
    f16x v;
    for (int i = 0; i < 16; i++) v[i] = from_f16(from[i]);
    return v;
#endif
}
DF_INLINE f16x from_codes(const int8_t *from) {
#if defined(__AVX512F__)
    return (f16x)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#else
    return __builtin_convertvector(__builtin_convertvector(load<b16x>(from), i16x), f16x);
#endif
}
DF_INLINE i16x widen_bytes(const uint8_t *from) {
#if defined(__AVX512F__)
    return (i16x)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
#else
    return __builtin_convertvector(load<ub16x>(from), i16x);
#endif
}
// 32 signed bytes as 16 pairs of 16-bit numbers.
DF_INLINE i16x widen_code_pairs(const int8_t *from) {
#if defined(__AVX512BW__)
    return (i16x)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)from));
#else
    typedef int8_t b32x __attribute__((vector_size(32)));
    typedef int16_t s32x __attribute__((vector_size(64)));
    return (i16x)__builtin_convertvector(load<b32x>(from), s32x);
#endif
}
// sums + even * even + odd * odd of 16-bit pairs; `pair` is the same for all lanes.
DF_INLINE i16x dot_pairs(i16x sums, i16x w, int32_t pair) {
#if defined(__AVX512VNNI__)
    return (i16x)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)w, _mm512_set1_epi32(pair));
#elif defined(__AVX512BW__)
    return sums + (i16x)_mm512_madd_epi16((__m512i)w, _mm512_set1_epi32(pair));
#elif defined(__AVX2__)
    __m256i halves[2], p = _mm256_set1_epi32(pair);
    memcpy(halves, &w, 64);
    for (auto &half : halves) half = _mm256_madd_epi16(half, p);
    return sums + load<i16x>(halves);
#else
    int32_t even = (int16_t)pair, odd = pair >> 16;
    return sums + (w << 16 >> 16) * even + (w >> 16) * odd;
#endif
}
DF_INLINE f16x to_float(i16x v) { return __builtin_convertvector(v, f16x); }
DF_INLINE i16x to_nearest(f16x v) {
#if defined(__AVX512F__)
    return (i16x)_mm512_cvtps_epi32((__m512)v);
#else
    f16x half = v < 0 ? all(-0.5f) : all(0.5f);
    return __builtin_convertvector(v + half, i16x);
#endif
}
DF_INLINE u16x widen_bf16(const uint16_t *from) { return __builtin_convertvector(load<h16x>(from), u16x) << 16; }

// Rounds to bf16 the way to_bf16 does (NaN aside).
DF_INLINE h16x narrow_bf16(f16x v) {
#if DF_DOT_BF16
    return (h16x)_mm512_cvtneps_pbh((__m512)v);
#else
    u16x u = (u16x)v;
    return __builtin_convertvector((u + 0x7fff + (u >> 16 & 1)) >> 16, h16x);
#endif
}

DF_INLINE float sum(f16x v) {
    float s[8];
    for (int i = 0; i < 8; i++) s[i] = v[i] + v[i + 8];
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}
DF_INLINE float largest(f16x v) {
    float m = v[0];
    for (int i = 1; i < 16; i++) m = v[i] > m ? v[i] : m;
    return m;
}
DF_INLINE f16x bigger(f16x a, f16x b) { return a > b ? a : b; }

// e^x to two units in the last place; 0 below about -87, and x is at most about 88.
DF_INLINE f16x exponential(f16x x) {
    f16x low = all(-87.33654f);
    f16x y = bigger(x, low);
    f16x n = y * 1.44269504f + 12582912.0f;  // rounds to a whole number
    n = n - 12582912.0f;
    f16x r = y - n * 0.693359375f + n * 2.12194440e-4f;
    f16x p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    i16x power = (__builtin_convertvector(n, i16x) + 127) << 23;
    f16x result = p * (f16x)power;
    return x < low ? zeros() : result;
}

// log(1 + t) for t in [0, 1].
DF_INLINE f16x log_one_plus(f16x t) {
    // log(1 + t) = 2 atanh(t / (2 + t)), whose argument is at most 1/3.
    f16x z = t / (t + 2.0f), z2 = z * z;
    f16x p = all(1.0f / 15);
    p = p * z2 + 1.0f / 13;
    p = p * z2 + 1.0f / 11;
    p = p * z2 + 1.0f / 9;
    p = p * z2 + 1.0f / 7;
    p = p * z2 + 1.0f / 5;
    p = p * z2 + 1.0f / 3;
    p = p * z2 + 1.0f;
    return 2.0f * z * p;
}
