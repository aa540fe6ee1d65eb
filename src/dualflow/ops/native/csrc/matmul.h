// Matrices packed for streaming, and products of a few to many rows with them.
//
// A packed matrix [n, k] is a sequence of strips of 16 outputs. Inside a strip inputs follow each other:
//   f32   [k][16]
//   bf16  [k / 2][16][2]          pairs of inputs, what the dot-product instruction eats
//   int8  [k / 2][16][2], scales float16 [k / 32][16]
//   int4  [k / 2][16] (even input in the low half), scales and minima float16 [k / 32][16]
// A thread owns a range of strips and reads them once, whatever the number of rows.
//
// Rows are floats; bf16 where the matrix is and the machine has the dot product; and for quantised
// matrices 16-bit whole numbers with a scale for every 32 inputs, finer than bf16 and summed exactly.
//
// Every output is the same sum in the same order whatever the number of rows, so a sequence's numbers do
// not depend on what else is in its batch.
#pragma once
#include <array>
#include <type_traits>
#include <utility>
#include <vector>

#include "api.h"
#include "simd.h"

namespace {

constexpr int STRIP = 16, GROUP = 32;
// A tile is MR rows by NR strips of accumulators; a tile of codes has as many again for a group's sums.
#if defined(__AVX512F__)
constexpr int MAX_TILE = 24, MAX_ROWS = 6;
#elif defined(__aarch64__)
constexpr int MAX_TILE = 6, MAX_ROWS = 6;
#elif defined(__AVX2__)
constexpr int MAX_TILE = 4, MAX_ROWS = 4;
#else
constexpr int MAX_TILE = 4, MAX_ROWS = 2;
#endif

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

struct Packed {
    int format = DF_F32, n = 0, k = 0;  // k is padded to the format's granularity
    int strips = 0;
    size_t strip_bytes = 0;             // of the codes
    const uint8_t *data = nullptr;
    const uint16_t *scale = nullptr, *minimum = nullptr;  // [strips][groups][16]
    const float *bias = nullptr;                          // [strips * 16] or null
    int groups() const { return k / GROUP; }
    bool codes() const { return format >= DF_INT8; }
    const uint8_t *strip(int s) const { return data + (size_t)s * strip_bytes; }
};

inline int padded_inputs(int format, int k) {
    return format == DF_F32 ? k : format == DF_BF16 ? ceil_div(k, 2) * 2 : ceil_div(k, GROUP) * GROUP;
}
inline size_t packed_strip_bytes(int format, int k) {
    size_t width = format == DF_F32 ? 64 : format == DF_BF16 ? 32 : format == DF_INT8 ? 16 : 8;
    return width * padded_inputs(format, k);
}

// The rows of a product; padding beyond the true width is zero. One of f, b, q is set.
struct Operand {
    const float *f = nullptr;
    const uint16_t *b = nullptr;
    int ld = 0;
    const int16_t *q = nullptr;      // with the scales and sums of each group, [rows][ld / 32]
    const float *scale = nullptr, *sum = nullptr;
    const float *row(int r) const { return f + (size_t)r * ld; }
    const uint16_t *row_bf16(int r) const { return b + (size_t)r * ld; }
    const int16_t *row_codes(int r) const { return q + (size_t)r * ld; }
    // The rows from `r` on. Not of codes, which are made inside a product.
    Operand from(int r) const { return {f ? row(r) : nullptr, b ? row_bf16(r) : nullptr, ld}; }
};

inline bool reads_bf16(int format) { return DF_DOT_BF16 && format == DF_BF16; }

// ---- microkernels: MR rows by NR strips, accumulators in registers ---------------------------------

template <int MR, int NR> struct Tile {
    f16x at[MR][NR];
};

// Asks for the lines that the next panel's strips have at the place where this one is being read. While the
// last rows of a step pass a panel, nothing else would be fetched.
template <int NR> DF_INLINE void fetch_ahead(const uint8_t *next, size_t stride, size_t from, size_t bytes) {
    if (!next) return;
    for (int n = 0; n < NR; n++)
        for (size_t at = from; at < from + bytes; at += 64) __builtin_prefetch(next + n * stride + at, 0, 2);
}

template <int MR, int NR>
DF_INLINE void dot_bf16(Tile<MR, NR> &t, const uint16_t *x, int ldx, const uint8_t *w, size_t stride, int k, const uint8_t *next) {
#if DF_DOT_BF16
    for (int i = 0; i < k; i += 2) {
        fetch_ahead<NR>(next, stride, (size_t)i * 32, 64);
        __m512bh wv[NR];
        DF_UNROLL
        for (int n = 0; n < NR; n++) wv[n] = (__m512bh)_mm512_loadu_si512(w + n * stride + (size_t)i * 32);
        DF_UNROLL
        for (int m = 0; m < MR; m++) {
            int32_t pair;
            memcpy(&pair, x + (size_t)m * ldx + i, 4);
            __m512bh xv = (__m512bh)_mm512_set1_epi32(pair);
            DF_UNROLL
            for (int n = 0; n < NR; n++) t.at[m][n] = {{(f16x::Part)_mm512_dpbf16_ps((__m512)t.at[m][n].part[0], wv[n], xv)}};
        }
    }
#endif
}

template <int MR, int NR>
DF_INLINE void dot_widened(Tile<MR, NR> &t, const float *x, int ldx, const uint8_t *w, size_t stride, int k) {
    for (int i = 0; i < k; i += 2)
        DF_UNROLL
        for (int n = 0; n < NR; n++) {
            u16x pair = load<u16x>(w + n * stride + (size_t)i * 32);
            f16x even = as<float>(pair << 16), odd = as<float>(pair & 0xffff0000u);
            DF_UNROLL
            for (int m = 0; m < MR; m++) {
                const float *xm = x + (size_t)m * ldx + i;
                t.at[m][n] += even * xm[0];
                t.at[m][n] += odd * xm[1];
            }
        }
}

template <int MR, int NR>
DF_INLINE void dot_f32(Tile<MR, NR> &t, const float *x, int ldx, const uint8_t *w, size_t stride, int k, const uint8_t *next) {
    for (int i = 0; i < k; i++) {
        fetch_ahead<NR>(next, stride, (size_t)i * 64, 64);
        f16x wv[NR];
        DF_UNROLL
        for (int n = 0; n < NR; n++) wv[n] = load<f16x>(w + n * stride + (size_t)i * 64);
        DF_UNROLL
        for (int m = 0; m < MR; m++) {
            float xm = x[(size_t)m * ldx + i];
            DF_UNROLL
            for (int n = 0; n < NR; n++) t.at[m][n] += wv[n] * xm;
        }
    }
}

// Two inputs of a quantised strip as pairs of 16-bit numbers.
DF_INLINE i16x read_codes(int format, const uint8_t *strip, int i) {
    if (format == DF_INT8) return load_byte_pairs((const int8_t *)strip + (size_t)i * 16);
    i16x both = load_unsigned_bytes(strip + (size_t)i * 8);
    return (both | (both << 12)) & 0x000f000f;
}

template <int MR, int NR, int FORMAT>
DF_INLINE void dot_codes(Tile<MR, NR> &t, const Operand &x, int row, const Packed &w, int s, const uint8_t *next) {
    int groups = w.groups(), group_bytes = (int)(w.strip_bytes / groups);
    for (int g = 0; g < groups; g++) {
        fetch_ahead<NR>(next, w.strip_bytes, (size_t)g * group_bytes, group_bytes);
        i16x part[MR][NR] = {};
        for (int i = g * GROUP; i < (g + 1) * GROUP; i += 2) {
            i16x wv[NR];
            DF_UNROLL
            for (int n = 0; n < NR; n++) wv[n] = read_codes(FORMAT, w.strip(s + n), i);
            DF_UNROLL
            for (int m = 0; m < MR; m++) {
                int32_t pair;
                memcpy(&pair, x.row_codes(row + m) + i, 4);
                DF_UNROLL
                for (int n = 0; n < NR; n++) part[m][n] = dot_pairs(part[m][n], wv[n], pair);
            }
        }
        DF_UNROLL
        for (int n = 0; n < NR; n++) {
            size_t at = ((size_t)(s + n) * groups + g) * STRIP;
            f16x scale = load_f16(w.scale + at);
            DF_UNROLL
            for (int m = 0; m < MR; m++)
                t.at[m][n] += convert<float>(part[m][n]) * (scale * x.scale[(size_t)(row + m) * groups + g]);
            if (w.format != DF_INT4) continue;
            f16x minimum = load_f16(w.minimum + at);
            DF_UNROLL
            for (int m = 0; m < MR; m++) t.at[m][n] += minimum * x.sum[(size_t)(row + m) * groups + g];
        }
    }
}

// ---- whole products -------------------------------------------------------------------------------

// Rows [row, row + MR) times strips [s, s + NR), bias added: out [MR][NR]. `next`: the strips that will be
// read after these, or null.
template <int MR, int NR>
void compute_tile(const Operand &x, int row, const Packed &w, int s, const uint8_t *next, f16x *out) {
    Tile<MR, NR> t{};
    const uint8_t *first = w.strip(s);
    if (w.format == DF_F32) dot_f32(t, x.row(row), x.ld, first, w.strip_bytes, w.k, next);
    else if (w.format == DF_BF16 && DF_DOT_BF16) dot_bf16(t, x.row_bf16(row), x.ld, first, w.strip_bytes, w.k, next);
    else if (w.format == DF_BF16) dot_widened(t, x.row(row), x.ld, first, w.strip_bytes, w.k);
    else if constexpr (2 * MR * NR <= MAX_TILE) {
        if (w.format == DF_INT8) dot_codes<MR, NR, DF_INT8>(t, x, row, w, s, next);
        else dot_codes<MR, NR, DF_INT4>(t, x, row, w, s, next);
    }
    for (int n = 0; n < NR; n++) {
        f16x bias = w.bias ? load<f16x>(w.bias + (size_t)(s + n) * STRIP) : zeros();
        for (int m = 0; m < MR; m++) out[m * NR + n] = t.at[m][n] + bias;
    }
}

using TileFunction = void (*)(const Operand &, int, const Packed &, int, const uint8_t *, f16x *);

template <int MR, int NR> constexpr TileFunction tile_function() {
    if constexpr (MR * NR <= MAX_TILE) return compute_tile<MR, NR>;
    else return nullptr;
}
template <int NR, int... M> constexpr std::array<TileFunction, sizeof...(M)> tiles_of(std::integer_sequence<int, M...>) {
    return {tile_function<M + 1, NR>()...};
}
template <int NR> constexpr auto TILES = tiles_of<NR>(std::make_integer_sequence<int, MAX_ROWS>{});

inline TileFunction tile_for(int rows, int strips) {
    return strips == 4 ? TILES<4>[rows - 1] : strips == 2 ? TILES<2>[rows - 1] : TILES<1>[rows - 1];
}

// What a thread needs for products.
struct MatmulScratch {
    std::vector<int16_t> codes;
    std::vector<float> scale, sum;
    alignas(64) f16x tile[MAX_TILE];
};

inline void quantise_rows(Operand &x, int rows, int groups, MatmulScratch &s) {
    size_t all_groups = (size_t)rows * groups;
    if (s.codes.size() < all_groups * GROUP) s.codes.resize(all_groups * GROUP), s.scale.resize(all_groups), s.sum.resize(all_groups);
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < groups; g++) {
            const float *from = x.row(r) + (size_t)g * GROUP;
            f16x low = load<f16x>(from), high = load<f16x>(from + 16);
            float top = largest(bigger(bigger(low, -low), bigger(high, -high)));
            float scale = top / 32767, inverse = top > 0 ? 32767 / top : 0;
            i16x a = to_nearest(low * inverse), b = to_nearest(high * inverse);
            int16_t *to = s.codes.data() + ((size_t)r * groups + g) * GROUP;
            store_narrow(to, a), store_narrow(to + 16, b);
            // A row that holds NaN or infinity must stay visible in its products; `top` may have missed a NaN.
            float total = sum(low + high);
            s.scale[(size_t)r * groups + g] = total - total == 0 ? scale : NAN;
            s.sum[(size_t)r * groups + g] = total;
        }
    x.q = s.codes.data(), x.scale = s.scale.data(), x.sum = s.sum.data(), x.ld = groups * GROUP;
}

// x [rows, k] times strips [begin, end), bias added: emit(row, strip, values) takes each strip of a row's
// outputs. `pairs`: strips belong together by two, and emit takes both (gate and up).
template <class Emit>
void matmul(Operand x, int rows, const Packed &w, int begin, int end, MatmulScratch &scratch, bool pairs, Emit emit) {
    if (rows == 0 || begin >= end) return;
    // Even shares of the rows for each tile, and the widest panel whose tile fits into the registers.
    int room = w.codes() ? MAX_TILE / 2 : MAX_TILE, most = std::min(MAX_ROWS, pairs ? room / 2 : room);
    int each = ceil_div(rows, ceil_div(rows, most)), widest = 4;
    while (widest > 1 && widest * each > room) widest /= 2;
    if (w.codes()) quantise_rows(x, rows, w.groups(), scratch);
    for (int s = begin, count; s < end; s += count) {
        for (count = widest; count > end - s;) count /= 2;
        for (int row = 0, now; row < rows; row += now) {
            now = std::min(each, rows - row);
            bool last = row + now == rows && s + 2 * count <= end;
            tile_for(now, count)(x, row, w, s, last ? w.strip(s + count) : nullptr, scratch.tile);
            for (int m = 0; m < now; m++)
                for (int n = 0; n < count; n += pairs ? 2 : 1) emit(row + m, s + n, scratch.tile + m * count + n);
        }
    }
}

// Pieces of `total` strips for thread `t` of `threads`, in multiples of `unit`.
inline void share_of(int total, int unit, int t, int threads, int &begin, int &end) {
    int units = ceil_div(total, unit);
    begin = (int)((int64_t)units * t / threads) * unit;
    end = (int)((int64_t)units * (t + 1) / threads) * unit;
    if (end > total) end = total;
}

// As share_of, for `first` strips that `first_rows` rows pass and `second` strips that fewer do: reading a
// strip costs about as much as a few rows.
inline void share_of_two(int first, int first_rows, int second, int second_rows, int t, int threads, int &begin, int &end) {
    int64_t a = first_rows + 4, b = second_rows + 4, total = first * a + second * b;
    auto cut = [&](int64_t cost) { return (int)(cost <= first * a ? cost / a : first + (cost - first * a) / b); };
    begin = cut(total * t / threads), end = t + 1 == threads ? first + second : cut(total * (t + 1) / threads);
}

// ---- packing ---------------------------------------------------------------------------------------

// Packs the 16 outputs from `row` on of `m` (rows beyond its last are zero) as strip `s` of `w`.
inline void pack_strip(const DfMatrix &m, int row, const Packed &w, int s) {
    uint8_t *to = const_cast<uint8_t *>(w.strip(s));
    uint16_t *scale = const_cast<uint16_t *>(w.scale), *minimum = const_cast<uint16_t *>(w.minimum);
    int groups = w.groups(), source_groups = ceil_div(m.k, GROUP), half = ceil_div(m.k, 2);
    memset(to, 0, w.strip_bytes);
    for (int c = 0; c < STRIP; c++) {
        int r = row + c;
        bool real = r < m.n;
        if (m.format >= DF_INT8)
            for (int g = 0; g < groups; g++) {
                size_t at = ((size_t)s * groups + g) * STRIP + c, from = (size_t)r * source_groups + g;
                scale[at] = real ? ((const uint16_t *)m.scale)[from] : 0;
                if (m.format == DF_INT4) minimum[at] = real ? ((const uint16_t *)m.minimum)[from] : 0;
            }
        if (!real) continue;
        switch (m.format) {
            case DF_F32:
                for (int i = 0; i < m.k; i++) ((float *)to)[(size_t)i * 16 + c] = ((const float *)m.data)[(size_t)r * m.k + i];
                break;
            case DF_BF16:
                for (int i = 0; i < m.k; i++)
                    ((uint16_t *)to)[(size_t)(i / 2) * 32 + c * 2 + i % 2] = ((const uint16_t *)m.data)[(size_t)r * m.k + i];
                break;
            case DF_INT8:
                for (int i = 0; i < m.k; i++)
                    to[(size_t)(i / 2) * 32 + c * 2 + i % 2] = ((const uint8_t *)m.data)[(size_t)r * m.k + i];
                break;
            case DF_INT4:
                for (int i = 0; i < half; i++) to[(size_t)i * 16 + c] = ((const uint8_t *)m.data)[(size_t)r * half + i];
                break;
        }
    }
}

// Row `r` of an unpacked matrix as floats: embeddings.
inline void read_row(const DfMatrix &m, int r, float *out) {
    size_t at = (size_t)r * m.k, groups = ceil_div(m.k, GROUP), half = ceil_div(m.k, 2);
    auto scale = [&](const void *table, int i) { return from_f16(((const uint16_t *)table)[r * groups + i / GROUP]); };
    switch (m.format) {
        case DF_F32: memcpy(out, (const float *)m.data + at, sizeof(float) * m.k); return;
        case DF_BF16:
            for (int i = 0; i < m.k; i++) out[i] = from_bf16(((const uint16_t *)m.data)[at + i]);
            return;
        case DF_INT8:
            for (int i = 0; i < m.k; i++) out[i] = scale(m.scale, i) * ((const int8_t *)m.data)[at + i];
            return;
        case DF_INT4:
            for (int i = 0; i < m.k; i++) {
                uint8_t both = ((const uint8_t *)m.data)[r * half + i / 2];
                out[i] = scale(m.scale, i) * (i % 2 ? both >> 4 : both & 15) + scale(m.minimum, i);
            }
    }
}

}  // namespace
