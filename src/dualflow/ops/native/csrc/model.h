// A model's packed weights, its cache and the rooms a step works in.
#pragma once
#include <memory>
#include <string>

#include "attention.h"
#include "memory.h"
#include "pool.h"

namespace {

// Two matrices in one: `second` of the strips of a pair interleaved with `first` (gate and up), or behind
// it (query, key, value).
struct LayerWeights {
    Packed qkv, o, gate_up, down;
};

// What a flow owns of a matrix: another in its place, or a low-rank addition b a x to it.
struct OwnWeights {
    Packed whole, a, b;
    int rank_ld() const { return a.strips * STRIP; }
};

// One flow's in one layer. Two matrices in one are so here too: `a` of gate and up stand one behind the other.
struct FlowWeights {
    OwnWeights q, o, gate_up, down;
};

// Places packed matrices one after the other in one large block.
class Packer {
  public:
    // What a fused matrix takes: its parts have the same inputs and format.
    Packed plan(const std::vector<const DfMatrix *> &parts) {
        Packed w;
        w.format = parts[0]->format;
        w.k = padded_inputs(w.format, parts[0]->k);
        for (auto *part : parts) w.strips += ceil_div(part->n, STRIP);
        w.n = w.strips * STRIP;
        w.strip_bytes = packed_strip_bytes(w.format, parts[0]->k);
        w.data = (const uint8_t *)take((size_t)w.strips * w.strip_bytes);
        size_t scales = (size_t)w.strips * w.groups() * STRIP * 2;
        if (w.format >= DF_INT8) w.scale = (const uint16_t *)take(scales);
        if (w.format == DF_INT4) w.minimum = (const uint16_t *)take(scales);
        bool bias = false;
        for (auto *part : parts) bias |= part->bias != nullptr;
        if (bias) w.bias = (const float *)take((size_t)w.n * 4);
        return w;
    }
    size_t bytes() const { return used_; }
    // The parts that have data; nothing where none has.
    Packed plan_some(const std::vector<const DfMatrix *> &parts) { return parts[0]->data ? plan(parts) : Packed{}; }
    static void settle(Packed &w, uint8_t *base) {  // offsets become addresses
        if (!w.data) return;
        w.data = base + ((size_t)w.data - 64);
        if (w.scale) w.scale = (const uint16_t *)(base + ((size_t)w.scale - 64));
        if (w.minimum) w.minimum = (const uint16_t *)(base + ((size_t)w.minimum - 64));
        if (w.bias) w.bias = (const float *)(base + ((size_t)w.bias - 64));
    }

  private:
    const void *take(size_t bytes) {  // never null: offsets are counted from 64
        size_t at = used_ + 64;
        used_ += (bytes + 63) / 64 * 64;
        return (const void *)at;
    }
    size_t used_ = 0;
};

// Fills the strips that thread t of `threads` will read. `step` 2 interleaves two parts.
inline void fill(const Packed &w, const std::vector<const DfMatrix *> &parts, bool interleaved, int unit, int t, int threads) {
    if (!w.data) return;
    int begin, end;
    share_of(w.strips, unit, t, threads, begin, end);
    for (int s = begin; s < end; s++) {
        int part = 0, strip = s;
        if (interleaved) part = s % (int)parts.size(), strip = s / (int)parts.size();
        else
            while (strip >= ceil_div(parts[part]->n, STRIP)) strip -= ceil_div(parts[part++]->n, STRIP);
        pack_strip(*parts[part], strip * STRIP, w, s);
        if (!w.bias) continue;
        float *bias = const_cast<float *>(w.bias) + (size_t)s * STRIP;
        for (int c = 0; c < STRIP; c++) {
            int row = strip * STRIP + c;
            bias[c] = parts[part]->bias && row < parts[part]->n ? parts[part]->bias[row] : 0;
        }
    }
}

// One part, `whole`, `a` or `b`, of what a flow owns of one matrix or of two in one.
inline std::vector<const DfMatrix *> parts_of(const std::vector<const DfOwn *> &own, DfMatrix DfOwn::*part) {
    std::vector<const DfMatrix *> parts;
    for (auto *one : own) parts.push_back(&(one->*part));
    return parts;
}

// Rows of a product: the primary's, then those of each flow.
struct Split {
    int primary, each, flows;
    int aux() const { return each * flows; }
};

// Sums over the vocabulary are made in blocks of columns that are cut at the same places whatever the number
// of threads, and added up in their order: so a text's numbers do not depend on how many threads there are.
constexpr int BLOCK = 1024;

inline int padded(int width) { return ceil_div(width, GROUP) * GROUP; }

// What a step writes and reads between its phases; grows with the rows.
struct Rooms {
    std::vector<float> h, qkv, y, norm_f, out_f, inner_f, query_f, hidden_f, low, part, part_top, part_total;
    std::vector<uint16_t> norm_b, out_b, inner_b, query_b, hidden_b;
    std::vector<float> kept_q, kept_u, kept_y, reduce, flows;
};

struct ThreadRoom {
    AttentionScratch attention;
    MatmulScratch matmul;
    std::vector<float> norm_f, low;
    std::vector<uint16_t> norm_b;
};

struct AttentionTask {
    int sequence, head, lane, lanes, first_key, end_key;  // keys from a chunk's begin on
    int parts;  // 0: the whole context; else how many tasks from the first of them on share it
};

}  // namespace
