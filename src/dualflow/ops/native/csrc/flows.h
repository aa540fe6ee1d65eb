// Products in which flows own something: a matrix in the shared one's place, or a low-rank addition to it.
// The shared matrix is read once for all rows that pass it; what a flow owns is read for its rows alone.
#pragma once
#include "step.h"

namespace {

// Up to so many bytes of the first of two low-rank matrices every thread makes the few rows between the two
// for itself, which is cheaper than waiting for the others.
constexpr size_t OWN_LOW_RANK_BYTES = 64 << 10;

// Sixteen outputs of one row of the second: two sums, so that an addition need not wait for the one before.
DF_INLINE f16x low_rank(const Packed &b, int strip, const float *z) {
    const uint8_t *w = b.strip(strip);
    f16x even = zeros(), odd = zeros();
    int i = 0;
    if (b.format == DF_BF16) {
        for (; i < b.k; i += 2, w += 64) {
            u16x pair = load<u16x>(w);
            even += as<float>(pair << 16) * z[i], odd += as<float>(pair & 0xffff0000u) * z[i + 1];
        }
        return even + odd;
    }
    for (; i + 2 <= b.k; i += 2, w += 128) even += load<f16x>(w) * z[i], odd += load<f16x>(w + 64) * z[i + 1];
    if (i < b.k) even += load<f16x>(w) * z[i];
    return even + odd;
}

// Calls act(packed, parts, unit) for everything that flows own; `unit`: the strips that one thread takes together.
template <class Act> inline void NativeModel::each_own(Act act) {
    for (size_t i = 0; i < flow_layers.size(); i++) {
        const DfAuxLayer &own = aux_layer[i];
        FlowWeights &w = flow_layers[i];
        bool gated = layer_spec[0].gate.data != nullptr;
        act(w.q, {&own.q}, 1), act(w.o, {&own.o}, 1), act(w.down, {&own.down}, 1);
        if (gated) act(w.gate_up, {&own.gate, &own.up}, 2);
        else act(w.gate_up, {&own.up}, 1);
    }
    for (size_t i = 0; i < flow_heads.size(); i++) act(flow_heads[i], {&aux_head[i]}, BLOCK / STRIP);
}

// The auxiliary rows between the two low-rank matrices, [flows x each, rank_ld].
template <class Own> inline const float *NativeModel::low_rank_rows(const Split &rows, const Operand &x, Own own, int t) {
    const Packed &shape = own(0).a;
    int threads = pool->size(), ld = own(0).rank_ld(), begin = 0, end = shape.strips, first = 0, last = rows.each;
    bool alone = threads == 1 || (rows.aux() <= OWN_NORM_ROWS && shape.strips * shape.strip_bytes <= OWN_LOW_RANK_BYTES);
    if (!alone && shape.strips >= threads) share_of(shape.strips, 1, t, threads, begin, end);
    else if (!alone) share_of(rows.each, 1, t, threads, first, last);
    bool small = rows.aux() <= OWN_NORM_ROWS && alone;
    float *z = small ? thread_rooms[t].low.data() : rooms.low.data();
    for (int flow = 0; flow < rows.flows; flow++) {
        int from = flow * rows.each + first;
        auto keep = [&](int row, int strip, const f16x *v) { store(z + (size_t)(from + row) * ld + strip * STRIP, *v); };
        matmul(x.from(rows.primary + from), last - first, own(flow).a, begin, end, thread_rooms[t].matmul, false, keep);
    }
    if (!alone) pool->barrier();
    return z;
}

// As `matmul`, over the rows of both flows, with what each flow owns of the matrix: own(flow). All threads come
// here, whatever they have to do.
template <class Own, class Emit>
inline void NativeModel::project(const Split &rows, const Operand &x, const Packed &shared, Own own, int begin, int end, bool pairs, int t, Emit emit) {
    MatmulScratch &scratch = thread_rooms[t].matmul;
    int all = rows.primary + rows.aux();
    if (!rows.aux() || !(own(0).whole.data || own(0).b.data)) return matmul(x, all, shared, begin, end, scratch, pairs, emit);
    if (own(0).whole.data) {
        matmul(x, rows.primary, shared, begin, end, scratch, pairs, emit);
        for (int flow = 0; flow < rows.flows; flow++) {
            int first = rows.primary + flow * rows.each;
            auto there = [&](int row, int strip, const f16x *v) { emit(first + row, strip, v); };
            matmul(x.from(first), rows.each, own(flow).whole, begin, end, scratch, pairs, there);
        }
        return;
    }
    int ld = own(0).rank_ld();
    const float *z = low_rank_rows(rows, x, own, t);
    auto with_addition = [&](int row, int strip, const f16x *v) {
        if (row < rows.primary) return emit(row, strip, v);
        const OwnWeights &mine = own((row - rows.primary) / rows.each);
        const float *low = z + (size_t)(row - rows.primary) * ld;
        f16x sums[2] = {v[0] + low_rank(mine.b, strip, low), zeros()};
        if (pairs) sums[1] = v[1] + low_rank(mine.b, strip + 1, low + ld / 2);
        emit(row, strip, sums);
    };
    matmul(x, all, shared, begin, end, scratch, pairs, with_addition);
}

}  // namespace
