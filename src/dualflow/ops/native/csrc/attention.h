// Attention over the paged cache. A page of one kv head is packed like a matrix: keys as strips of 16
// slots (so that scores of 16 keys come out side by side), values as strips of 16 channels. Both products
// of attention are then the microkernels of matmul.h, and bf16 uses the dot-product instruction.
//
// Every query lane (row of either flow x query head) that looks through a kv head reads its pages
// together: the auxiliary costs no second pass over the cache (grouped execution).
#pragma once
#include "matmul.h"

namespace {

struct Cache {
    int format, pages, page_size, kv_heads, head_dim, layers;
    size_t block_bytes;  // keys or values of one page and head
    uint8_t *data;       // [layers][2][kv_heads][pages] blocks: pages that follow each other lie so
    float *scale;        // int8: [layers][2][kv_heads][pages][page_size]

    size_t index(int layer, int page, int kind, int head) const {
        return ((size_t)(layer * 2 + kind) * kv_heads + head) * pages + page;
    }
    uint8_t *block(int layer, int page, int kind, int head) const { return data + index(layer, page, kind, head) * block_bytes; }
    float *scales(int layer, int page, int kind, int head) const { return scale + index(layer, page, kind, head) * page_size; }
    // Calls f(layer, kind, head) for every block of a page.
    template <class F> void each(F f) const {
        for (int layer = 0; layer < layers; layer++)
            for (int kind = 0; kind < 2; kind++)
                for (int head = 0; head < kv_heads; head++) f(layer, kind, head);
    }
    size_t bytes() const {
        size_t blocks = (size_t)layers * pages * 2 * kv_heads;
        return blocks * (block_bytes + (format == DF_INT8 ? page_size * sizeof(float) : 0));
    }
};

// Puts x, times `scale`, into the packed block: keys (kind 0) as a lane of the reduction over channels,
// values (kind 1) as one step of the reduction over slots.
template <class To, int PAIR, class From, class Convert>
DF_INLINE void scatter(To *block, int kind, int at, int H, int Z, const From *x, Convert convert) {
    if (kind == 0) {
        To *to = block + (size_t)(at / 16) * H * 16 + (at % 16) * PAIR;
        for (int i = 0; i < H; i += PAIR, to += 16 * PAIR)
            for (int k = 0; k < PAIR; k++) to[k] = convert(x[i + k]);
    } else {
        To *to = block + (size_t)(at / PAIR) * 16 * PAIR + at % PAIR;
        for (int i = 0; i < H; i += 16, to += (size_t)Z * 16)
            for (int k = 0; k < 16; k++) to[k * PAIR] = convert(x[i + k]);
    }
}

// Stores one key (kind 0) or value (kind 1) of `head` into a slot.
inline void write_cache(const Cache &c, int layer, int slot, int kind, int head, const float *x) {
    int page = slot / c.page_size, at = slot % c.page_size, H = c.head_dim, Z = c.page_size;
    uint8_t *block = c.block(layer, page, kind, head);
    if (c.format == DF_F32) return scatter<float, 1>((float *)block, kind, at, H, Z, x, [](float v) { return v; });
    if (c.format == DF_BF16) {
        uint16_t narrow[H];
        for (int i = 0; i < H; i += 16) store_bf16(narrow + i, load<f16x>(x + i));
        return scatter<uint16_t, 2>((uint16_t *)block, kind, at, H, Z, narrow, [](uint16_t v) { return v; });
    }
    float top = 0, total = 0;
    for (int i = 0; i < H; i++) top = fmaxf(top, fabsf(x[i])), total += x[i];
    bool finite = total - total == 0;  // what is not stays visible, through its scale
    c.scales(layer, page, kind, head)[at] = finite ? top / 127 : NAN;
    float inverse = finite && top > 0 ? 127 / top : 0;
    scatter<int8_t, 1>((int8_t *)block, kind, at, H, Z, x, [=](float v) { return (int8_t)(inverse > 0 ? lrintf(v * inverse) : 0); });
}

// Lanes of one sequence and kv head that are computed together.
struct LaneBlock {
    int layer, head, lanes;
    const int *limit;        // [lanes] keys each lane sees, up to this one
    const int *begin;        // [lanes] the first of them
    float scale, softcap;    // of scores; no cap: 0
    Operand query;           // [lanes] rows of head_dim
    const int32_t *pages;
    int first_key, end_key;  // the keys to look at: whole pages from first_key on
};

// Lanes of a block, and keys of a chunk: contexts are always cut at the same places and joined in the same
// order, so that a sequence's numbers do not depend on how the work was shared out.
constexpr int LANES = 24, CHUNK = 256;

struct AttentionScratch {
    std::vector<float> scores;     // [LANES][CHUNK]
    std::vector<uint16_t> weights; // the same, bf16
    std::vector<uint8_t> unpacked; // one int8 block, widened
    std::vector<uint16_t> query_b;
    std::vector<float> query_f;
    std::vector<int> limit, begin;
    std::vector<float> out, top, total;  // [LANES][H] of one chunk
    void reserve(int head_dim, int page_size) {
        scores.resize((size_t)LANES * CHUNK), weights.resize((size_t)LANES * CHUNK);
        out.resize((size_t)LANES * head_dim), top.resize(LANES), total.resize(LANES);
        unpacked.resize((size_t)page_size * head_dim * 4);
        query_b.resize((size_t)LANES * head_dim);
        query_f.resize((size_t)LANES * head_dim);
        limit.resize(LANES), begin.resize(LANES);
    }
};

// A block of the cache as strips to multiply with: int8 is widened into scratch first.
inline const uint8_t *readable(const Cache &c, int layer, int page, int kind, int head, AttentionScratch &s) {
    const uint8_t *block = c.block(layer, page, kind, head);
    if (c.format != DF_INT8) return block;
    int reduction = kind == 0 ? c.head_dim : c.page_size;
    int strips = (kind == 0 ? c.page_size : c.head_dim) / STRIP;
    const int8_t *codes = (const int8_t *)block;
    for (int n = 0; n < strips; n++)
        for (int i = 0; i < reduction; i += 2) {
            const int8_t *from = codes + ((size_t)n * reduction + i) * 16;
            size_t to = ((size_t)n * reduction + i) * 16;
            if (DF_DOT_BF16) {
                u16x low = as<uint32_t>(convert<float>(load_bytes(from))) >> 16;
                u16x high = as<uint32_t>(convert<float>(load_bytes(from + 16))) & 0xffff0000u;
                store((uint16_t *)s.unpacked.data() + to, low | high);  // codes are exact in bf16
            } else {
                store((float *)s.unpacked.data() + to, convert<float>(load_bytes(from)));
                store((float *)s.unpacked.data() + to + 16, convert<float>(load_bytes(from + 16)));
            }
        }
    return s.unpacked.data();
}

template <int MR, int NR>
DF_INLINE void multiply_block(Tile<MR, NR> &t, int format, const Operand &x, int row, const uint8_t *w, int reduction) {
    if (format == DF_F32 || (format == DF_INT8 && !DF_DOT_BF16))
        dot_f32(t, x.row(row), x.ld, w, (size_t)reduction * 64, reduction, nullptr);
    else if (DF_DOT_BF16)
        dot_bf16(t, x.row_bf16(row), x.ld, w, (size_t)reduction * 32, reduction, nullptr);
    else
        dot_widened(t, x.row(row), x.ld, w, (size_t)reduction * 32, reduction);
}

constexpr int LANE_ROWS = MAX_ROWS < 6 ? MAX_ROWS : 6;

// f(MR, row) for all rows, MR a compile-time number of at most LANE_ROWS.
template <class F> inline void by_rows(int rows, F f) {
    int row = 0;
    for (; row + LANE_ROWS <= rows; row += LANE_ROWS) f(std::integral_constant<int, LANE_ROWS>{}, row);
    switch (rows - row) {
        case 1: return f(std::integral_constant<int, 1>{}, row);
        case 2: if constexpr (LANE_ROWS > 2) return f(std::integral_constant<int, 2>{}, row); break;
        case 3: if constexpr (LANE_ROWS > 3) return f(std::integral_constant<int, 3>{}, row); break;
        case 4: if constexpr (LANE_ROWS > 4) return f(std::integral_constant<int, 4>{}, row); break;
        case 5: if constexpr (LANE_ROWS > 5) return f(std::integral_constant<int, 5>{}, row); break;
    }
}

// Asks for a block that is about to be read: pages lie apart, which the machine's own guess misses.
inline void prefetch(const uint8_t *block, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(block + i, 0, 2);
}

template <int MR>
__attribute__((noinline)) void scores_of(const Cache &c, const LaneBlock &b, int row, float *scores, int keys, AttentionScratch &s) {
    int H = c.head_dim, Z = c.page_size;
    for (int key = b.first_key; key < b.end_key; key += Z) {
        if (row == 0) {
            if (key + 2 * Z < b.end_key) prefetch(c.block(b.layer, b.pages[key / Z + 2], 0, b.head), c.block_bytes);
            prefetch(c.block(b.layer, b.pages[key / Z], 1, b.head), c.block_bytes);
        }
        const uint8_t *w = readable(c, b.layer, b.pages[key / Z], 0, b.head, s);
        size_t strip_bytes = (size_t)H * (c.format == DF_F32 || !(DF_DOT_BF16 || c.format == DF_BF16) ? 64 : 32);
        int n = 0;
        auto emit = [&](auto &t, int strips) {
            for (int m = 0; m < MR; m++)
                for (int k = 0; k < strips; k++)
                    store(scores + (size_t)(row + m) * keys + key - b.first_key + (n + k) * STRIP, t.at[m][k]);
        };
        if constexpr (2 * MR <= MAX_TILE)
            for (; n + 2 <= Z / STRIP; n += 2) {
                Tile<MR, 2> t{};
                multiply_block(t, c.format, b.query, row, w + n * strip_bytes, H);
                emit(t, 2);
            }
        for (; n < Z / STRIP; n++) {
            Tile<MR, 1> t{};
            multiply_block(t, c.format, b.query, row, w + n * strip_bytes, H);
            emit(t, 1);
        }
    }
}

template <int MR, int NR>
__attribute__((noinline)) void values_of(const Cache &c, const LaneBlock &b, int row, int strip, const Operand &weights, float *out, int ld, AttentionScratch &s) {
    int Z = c.page_size;
    size_t strip_bytes = (size_t)Z * (c.format == DF_F32 || !(DF_DOT_BF16 || c.format == DF_BF16) ? 64 : 32);
    Tile<MR, NR> t{};
    for (int key = b.first_key; key < b.end_key; key += Z) {
        const uint8_t *w = readable(c, b.layer, b.pages[key / Z], 1, b.head, s);
        Operand x = weights;
        if (x.f) x.f += key - b.first_key;
        if (x.b) x.b += key - b.first_key;
        multiply_block(t, c.format, x, row, w + strip * strip_bytes, Z);
    }
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NR; n++) store(out + (size_t)(row + m) * ld + (strip + n) * STRIP, t.at[m][n]);
}

// Unnormalised attention of a block of lanes over at most a chunk of keys: out [lanes][ld >= H] = sum of e^(score - top) v, with the
// tops and the sums of weights, so that parts of a long context can be joined.
inline void attend_block(const Cache &c, const LaneBlock &b, float *out, int ld, float *top, float *total, AttentionScratch &s) {
    int H = c.head_dim, Z = c.page_size, keys = ceil_div(b.end_key - b.first_key, Z) * Z;
    float *scores = s.scores.data();
    bool bf16 = DF_DOT_BF16 && c.format != DF_F32;
    by_rows(b.lanes, [&](auto mr, int row) { scores_of<mr.value>(c, b, row, scores, keys, s); });
    for (int l = 0; l < b.lanes; l++) {
        float *row = scores + (size_t)l * keys;
        uint16_t *row_b = s.weights.data() + (size_t)l * keys;
        int seen = b.limit[l] - b.first_key, hidden = b.begin[l] - b.first_key;
        seen = seen < 0 ? 0 : seen > keys ? keys : seen;
        f16x best = all(-INFINITY);
        for (int key = 0; key < keys; key += 16) {
            f16x v = load<f16x>(row + key) * b.scale;
            if (c.format == DF_INT8) {
                int at = b.first_key + key;
                v *= load<f16x>(c.scales(b.layer, b.pages[at / Z], 0, b.head) + at % Z);
            }
            if (b.softcap > 0) v = hyperbolic_tangent(v / b.softcap) * b.softcap;
            if (key + 16 > seen || key < hidden)
                for (int i = 0; i < 16; i++)
                    if (key + i >= seen || key + i < hidden) v.set(i, -INFINITY);
            best = bigger(v, best);
            store(row + key, v);
        }
        top[l] = largest(best);
        f16x sums = zeros();
        float from = top[l] == -INFINITY ? 0 : top[l];
        for (int key = 0; key < keys; key += 16) {
            f16x v = key >= seen ? zeros() : exponential(load<f16x>(row + key) - from);
            sums += v;
            if (c.format == DF_INT8) {
                int at = b.first_key + key;
                v *= load<f16x>(c.scales(b.layer, b.pages[at / Z], 1, b.head) + at % Z);
            }
            if (bf16) store_bf16(row_b + key, v);
            else store(row + key, v);
        }
        total[l] = sum(sums);
    }
    Operand weights{bf16 ? nullptr : scores, bf16 ? s.weights.data() : nullptr, keys};
    by_rows(b.lanes, [&](auto mr, int row) {
        int strip = 0, strips = H / STRIP;
        if constexpr (4 * decltype(mr)::value <= MAX_TILE)
            for (; strip + 4 <= strips; strip += 4) values_of<mr.value, 4>(c, b, row, strip, weights, out, ld, s);
        if constexpr (2 * decltype(mr)::value <= MAX_TILE)
            for (; strip + 2 <= strips; strip += 2) values_of<mr.value, 2>(c, b, row, strip, weights, out, ld, s);
        for (; strip < strips; strip++) values_of<mr.value, 1>(c, b, row, strip, weights, out, ld, s);
    });
}

// Joins the next chunk's result to what the chunks before gave; `top` -infinity and `total` 0 at first.
inline void join_chunk(int H, float *out, float &top, float &total, const float *next, float next_top, float next_total) {
    float best = fmaxf(top, next_top);
    if (best == -INFINITY) return;
    float keep = top == -INFINITY ? 0 : expf(top - best), add = next_top == -INFINITY ? 0 : expf(next_top - best);
    for (int i = 0; i < H; i += 16) store(out + i, load<f16x>(out + i) * keep + load<f16x>(next + i) * add);
    total = total * keep + next_total * add;
    top = best;
}

}  // namespace
