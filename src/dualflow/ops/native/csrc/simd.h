// Sixteen lanes at a time, whatever the instruction set: one strip of a packed matrix is 16 columns wide
// everywhere. Sixteen lanes are as many of the machine's own vectors (GCC's and Clang's vector types) as
// it takes; the few operations that those types do not know are spelled out.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define DF_VECTOR 64
#elif defined(__AVX2__)
#define DF_VECTOR 32
#else
#define DF_VECTOR 16
#endif

#if defined(__AVX512BF16__)
#define DF_DOT_BF16 1
#else
#define DF_DOT_BF16 0
#endif

#define DF_INLINE static inline __attribute__((always_inline))
// Loops over a tile must be gone before its accumulators can live in registers.
#define DF_UNROLL _Pragma("GCC unroll 16")
#define DF_MEMBER inline __attribute__((always_inline))

constexpr int EACH = DF_VECTOR / 4, PARTS = 16 / EACH;  // lanes of a part, parts of 16 lanes

template <class T> struct Wide {
    typedef T Part __attribute__((vector_size(DF_VECTOR)));
    Part part[PARTS];

    DF_MEMBER T operator[](int i) const { return part[i / EACH][i % EACH]; }
    DF_MEMBER void set(int i, T x) { part[i / EACH][i % EACH] = x; }
    // Of f(part's index). Not a loop: compilers keep arrays out of registers until loops are unrolled.
    template <class F> DF_MEMBER static Wide make(F f) {
        if constexpr (PARTS == 1) return {{f(0)}};
        else if constexpr (PARTS == 2) return {{f(0), f(1)}};
        else return {{f(0), f(1), f(2), f(3)}};
    }
};

typedef Wide<float> f16x;
typedef Wide<int32_t> i16x;
typedef Wide<uint32_t> u16x;

#define DF_OPERATOR(OP)                                                                                       \
    template <class T> DF_INLINE Wide<T> operator OP(Wide<T> a, Wide<T> b) {                                  \
        return Wide<T>::make([&](int p) { return a.part[p] OP b.part[p]; });                                  \
    }                                                                                                         \
    template <class T> DF_INLINE Wide<T> operator OP(Wide<T> a, T b) {                                        \
        return Wide<T>::make([&](int p) { return a.part[p] OP b; });                                          \
    }                                                                                                         \
    template <class T> DF_INLINE Wide<T> operator OP(T a, Wide<T> b) {                                        \
        return Wide<T>::make([&](int p) { return a OP b.part[p]; });                                          \
    }
DF_OPERATOR(+)
DF_OPERATOR(-)
DF_OPERATOR(*)
DF_OPERATOR(/)
DF_OPERATOR(&)
DF_OPERATOR(|)
#undef DF_OPERATOR
template <class T> DF_INLINE Wide<T> operator-(Wide<T> a) { return Wide<T>::make([&](int p) { return -a.part[p]; }); }
template <class T> DF_INLINE Wide<T> operator<<(Wide<T> a, int n) { return Wide<T>::make([&](int p) { return a.part[p] << n; }); }
template <class T> DF_INLINE Wide<T> operator>>(Wide<T> a, int n) { return Wide<T>::make([&](int p) { return a.part[p] >> n; }); }
template <class T, class U> DF_INLINE Wide<T> &operator+=(Wide<T> &a, U b) { return a = a + b; }
template <class T, class U> DF_INLINE Wide<T> &operator*=(Wide<T> &a, U b) { return a = a * b; }

// a's lanes where x > y, else b's.
DF_INLINE f16x where_above(f16x x, f16x y, f16x a, f16x b) {
    return f16x::make([&](int p) { return x.part[p] > y.part[p] ? a.part[p] : b.part[p]; });
}
template <class To, class From> DF_INLINE Wide<To> as(Wide<From> v) {  // the same bits
    return Wide<To>::make([&](int p) { return (typename Wide<To>::Part)v.part[p]; });
}
template <class To, class From> DF_INLINE Wide<To> convert(Wide<From> v) {  // the same values
    return Wide<To>::make([&](int p) { return __builtin_convertvector(v.part[p], typename Wide<To>::Part); });
}

// Part by part: a copy of the whole would pass through memory.
template <class P> DF_INLINE P load_part(const void *from) {
    P part;
    __builtin_memcpy(&part, from, sizeof part);
    return part;
}
template <class V> DF_INLINE V load(const void *from) {
    return V::make([&](int p) { return load_part<typename V::Part>((const char *)from + p * DF_VECTOR); });
}
template <class T> DF_INLINE void store(void *to, Wide<T> v) {
    __builtin_memcpy(to, &v.part[0], DF_VECTOR);
    if constexpr (PARTS >= 2) __builtin_memcpy((char *)to + DF_VECTOR, &v.part[1], DF_VECTOR);
    if constexpr (PARTS == 4) {
        __builtin_memcpy((char *)to + 2 * DF_VECTOR, &v.part[2], DF_VECTOR);
        __builtin_memcpy((char *)to + 3 * DF_VECTOR, &v.part[3], DF_VECTOR);
    }
}
DF_INLINE f16x zeros() { return f16x{}; }
DF_INLINE f16x all(float x) { return x - f16x{}; }

// ---- number formats ---------------------------------------------------------------------------------

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
    return {{(f16x::Part)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from))}};
#elif defined(__F16C__)
    return f16x::make([&](int p) { return (f16x::Part)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + p * EACH))); });
#else
    f16x v;
    for (int i = 0; i < 16; i++) v.set(i, from_f16(from[i]));
    return v;
#endif
}

// 16 narrow numbers, widened to 32 bits a lane.
template <class Narrow, class To> DF_INLINE Wide<To> widen(const Narrow *from) {
    typedef Narrow Piece __attribute__((vector_size(EACH * sizeof(Narrow))));
    return Wide<To>::make([&](int p) { return __builtin_convertvector(load_part<Piece>(from + p * EACH), typename Wide<To>::Part); });
}
DF_INLINE i16x load_bytes(const int8_t *from) {
#if defined(__AVX512F__)
    return {{(i16x::Part)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from))}};
#else
    return widen<int8_t, int32_t>(from);
#endif
}
DF_INLINE i16x load_unsigned_bytes(const uint8_t *from) {
#if defined(__AVX512F__)
    return {{(i16x::Part)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from))}};
#else
    return widen<uint8_t, int32_t>(from);
#endif
}
DF_INLINE f16x load_bf16(const uint16_t *from) { return as<float>(widen<uint16_t, uint32_t>(from) << 16); }

template <class Narrow, class From> DF_INLINE void store_narrow(Narrow *to, Wide<From> v) {
    typedef Narrow Piece __attribute__((vector_size(EACH * sizeof(Narrow))));
    for (int p = 0; p < PARTS; p++) {
        Piece piece = __builtin_convertvector(v.part[p], Piece);
        __builtin_memcpy(to + p * EACH, &piece, sizeof piece);
    }
}
// Rounds the way to_bf16 does (NaN aside, which stays one).
DF_INLINE void store_bf16(uint16_t *to, f16x v) {
#if DF_DOT_BF16
    __m256bh narrow = _mm512_cvtneps_pbh((__m512)v.part[0]);
    __builtin_memcpy(to, &narrow, sizeof narrow);
#else
    u16x u = as<uint32_t>(v);
    store_narrow(to, (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
#endif
}

// 32 signed bytes as 16 pairs of 16-bit numbers.
DF_INLINE i16x load_byte_pairs(const int8_t *from) {
#if defined(__AVX512BW__)
    return {{(i16x::Part)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)from))}};
#else
    typedef int8_t Bytes __attribute__((vector_size(2 * EACH)));
    typedef int16_t Halves __attribute__((vector_size(DF_VECTOR)));
    return i16x::make([&](int p) { return (i16x::Part)__builtin_convertvector(load_part<Bytes>(from + 2 * p * EACH), Halves); });
#endif
}
// sums + even * even + odd * odd of 16-bit pairs; `pair` is the same for all lanes.
DF_INLINE i16x dot_pairs(i16x sums, i16x w, int32_t pair) {
#if defined(__AVX512VNNI__)
    return {{(i16x::Part)_mm512_dpwssd_epi32((__m512i)sums.part[0], (__m512i)w.part[0], _mm512_set1_epi32(pair))}};
#elif defined(__AVX512BW__)
    return {{sums.part[0] + (i16x::Part)_mm512_madd_epi16((__m512i)w.part[0], _mm512_set1_epi32(pair))}};
#elif defined(__AVX2__)
    return i16x::make([&](int p) { return sums.part[p] + (i16x::Part)_mm256_madd_epi16((__m256i)w.part[p], _mm256_set1_epi32(pair)); });
#elif defined(__x86_64__)
    return i16x::make([&](int p) { return sums.part[p] + (i16x::Part)_mm_madd_epi16((__m128i)w.part[p], _mm_set1_epi32(pair)); });
#else
    int32_t even = (int16_t)pair, odd = pair >> 16;
    return sums + ((w << 16) >> 16) * even + (w >> 16) * odd;
#endif
}
DF_INLINE i16x to_nearest(f16x v) {
#if defined(__AVX512F__)
    return {{(i16x::Part)_mm512_cvtps_epi32((__m512)v.part[0])}};
#else
    return convert<int32_t>(v + where_above(v, zeros(), all(0.5f), all(-0.5f)));
#endif
}

// ---- functions --------------------------------------------------------------------------------------

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
DF_INLINE f16x bigger(f16x a, f16x b) { return where_above(a, b, a, b); }

// e^x to two units in the last place; 0 below about -87, and x is at most about 88. NaN stays NaN.
DF_INLINE f16x exponential(f16x x) {
    f16x low = all(-87.33654f);
    f16x y = where_above(low, x, low, x);
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
    i16x power = (convert<int32_t>(n) + 127) << 23;
    return where_above(low, x, zeros(), p * as<float>(power));
}

// tanh(x) to a few units in the last place.
DF_INLINE f16x hyperbolic_tangent(f16x x) {
    f16x size = where_above(x, zeros(), x, -x), z = x * x, twice = where_above(size, all(20), all(40), size + size);
    f16x far = 1.0f - 2.0f / (exponential(twice) + 1.0f);  // cancels where x is small
    f16x p = all(-0.0065484f);
    p = p * z + 0.02127644f;
    p = p * z - 0.05390407f;
    p = p * z + 0.13333087f;
    p = p * z - 0.33333332f;
    return where_above(all(0.55f), size, x + x * z * p, where_above(x, zeros(), far, -far));
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
