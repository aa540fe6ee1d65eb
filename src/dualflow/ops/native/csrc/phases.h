// The phases of a layer, and the readout: what every thread does between two barriers of a step.
#pragma once
#include "flows.h"

namespace {

inline void NativeModel::layer(Frame &f, int l, int t) {
    LayerWeights &w = layers[l];
    int threads = pool->size(), begin, end;
    Operand n = norm_rows(f, l, false, w.qkv.format, t);
    int queries = NH / STRIP;
    share_of_two(queries, f.R, w.qkv.strips - queries, f.T, t, threads, begin, end);
    float *qkv = rooms.qkv.data();
    auto emit = [&](int row, int strip, const f16x *v) { store(qkv + (size_t)row * QKV + strip * STRIP, *v); };
    // The auxiliary has no keys and values: its rows stop at the query's columns.
    project(f.split(), n, w.qkv, own_of(&FlowWeights::q, l), begin, std::min(end, queries), false, t, emit);
    matmul(n, f.T, w.qkv, std::max(begin, queries), end, thread_rooms[t].matmul, false, emit);
    couple(f, begin * STRIP, std::min(end, queries) * STRIP, &DfAuxLayer::query, l, qkv, QKV, rooms.kept_q, NH);
    pool->barrier();
    rotate_and_write(f, l, t);
    pool->barrier();
    attend(f, l, t);
    pool->barrier();

    bool bf16 = reads_bf16(w.o.format);
    Operand o{bf16 ? nullptr : rooms.out_f.data(), bf16 ? rooms.out_b.data() : nullptr, out_ld};
    share_of(w.o.strips, 1, t, threads, begin, end);
    bool normed = layer_spec[l].attention_output_norm.gain != nullptr;
    float *h = rooms.h.data(), *y = rooms.y.data();
    auto add = [&](int row, int strip, const f16x *v) {
        size_t at = (size_t)row * D + strip * STRIP;
        if (normed) store(y + at, *v);
        else store(h + at, load<f16x>(h + at) + *v);
    };
    project(f.split(), o, w.o, own_of(&FlowWeights::o, l), begin, end, false, t, add);
    pool->barrier();
    if (normed) norm_outputs(f, l, &DfLayer::attention_output_norm, &DfAuxLayer::attention_output_norm, true, t);
    mlp(f, l, t);
}

inline void NativeModel::mlp(Frame &f, int l, int t) {
    LayerWeights &w = layers[l];
    int threads = pool->size(), begin, end, kind = spec.mlp;
    bool gated = layer_spec[l].gate.data != nullptr;
    Operand m = norm_rows(f, l, true, w.gate_up.format, t);
    bool bf16 = reads_bf16(w.down.format);
    float *u = rooms.inner_f.data();
    uint16_t *u_b = rooms.inner_b.data();
    auto act = [&](int row, int strip, const f16x *v) {  // v: gate and up, or up alone
        f16x value = activate(kind, v[0], v[gated ? 1 : 0]);
        put(u, u_b, bf16, (size_t)row * inner_ld + (gated ? strip / 2 : strip) * STRIP, value);
    };
    share_of(w.gate_up.strips, gated ? 2 : 1, t, threads, begin, end);
    project(f.split(), m, w.gate_up, own_of(&FlowWeights::gate_up, l), begin, end, gated, t, act);
    int share = gated ? 2 : 1;
    couple_inner(f, l, begin / share * STRIP, std::min(end / share * STRIP, F), bf16);
    pool->barrier();

    Operand x{bf16 ? nullptr : u, bf16 ? u_b : nullptr, inner_ld};
    float *y = rooms.y.data(), *h = rooms.h.data();
    auto keep = [&](int row, int strip, const f16x *v) { store(y + (size_t)row * D + strip * STRIP, *v); };
    share_of(w.down.strips, 1, t, threads, begin, end);
    project(f.split(), x, w.down, own_of(&FlowWeights::down, l), begin, end, false, t, keep);
    if (layer_spec[l].mlp_output_norm.gain) {
        pool->barrier();
        norm_outputs(f, l, &DfLayer::mlp_output_norm, &DfAuxLayer::mlp_output_norm, false, t);
    }
    couple(f, begin * STRIP, end * STRIP, &DfAuxLayer::output, l, y, D, rooms.kept_y, D);
    for (int row = 0; row < f.R; row++)
        for (int c = begin * STRIP; c < end * STRIP; c += STRIP) {
            size_t at = (size_t)row * D + c;
            store(h + at, load<f16x>(h + at) + load<f16x>(y + at));
        }
    pool->barrier();
}

// As `couple`, on the operand of the down matrix: what the primary's rows have there, rounded or not, is u1.
inline void NativeModel::couple_inner(Frame &f, int l, int begin, int end, bool bf16) {
    if (begin >= end) return;
    auto get = [&](int row, int c) {
        size_t at = (size_t)row * inner_ld + c;
        return bf16 ? load_bf16(&rooms.inner_b[at]) : load<f16x>(&rooms.inner_f[at]);
    };
    float *kept = rooms.kept_u.data();
    for (int i = 0; f.s.keep && i < f.reads; i++)
        for (int c = begin; c < end; c += 16) store(kept + ((size_t)l * f.reads + i) * F + c, get(f.s.read[i], c));
    for (int flow = 0; flow < f.flows; flow++) {
        const float *v = aux_layer[(size_t)flow * spec.layers + l].intermediate;
        for (int a = 0; v && a < f.A; a++) {
            int row = f.T + flow * f.A + a;
            const float *from = kept + ((size_t)l * kept_rows + f.pin(a)) * F;
            for (int c = begin; c < end; c += 16) {
                f16x primary = f.T ? get(f.pin(a), c) : load<f16x>(from + c);
                put(rooms.inner_f.data(), rooms.inner_b.data(), bf16, (size_t)row * inner_ld + c, get(row, c) + load<f16x>(v + c) * primary);
            }
        }
    }
}

DF_INLINE void rotate_head(float *x, int dim, const float *cosines, const float *sines) {
    int half = dim / 2;
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cosines[i] - b * sines[i];
        x[i + half] = b * cosines[i] + a * sines[i];
    }
}

// QK-norm and rotation of every row's query and of the primary's keys; keys and values go to their slots.
inline void NativeModel::rotate_and_write(Frame &f, int l, int t) {
    int H = spec.head_dim;
    bool bf16 = DF_DOT_BF16 && spec.kv_format != DF_F32, local = layer_spec[l].window > 0 && spec.local_cosines;
    // Neighbours in a text share lines of the cache, so each thread takes rows that follow each other.
    int begin, end;
    share_of(f.R, 1, t, pool->size(), begin, end);
    for (int row = begin; row < end; row++) {
        float *q = rooms.qkv.data() + (size_t)row * QKV, *k = q + NH, *v = k + KH;
        size_t turn = (size_t)*f.position(row) * (H / 2);
        const float *cosines = spec.cosines ? (local ? spec.local_cosines : spec.cosines) + turn : nullptr;
        const float *sines = spec.sines ? (local ? spec.local_sines : spec.sines) + turn : nullptr;
        auto turn_heads = [&](float *row, int heads, const DfGain &gain) {
            if (gain.gain && spec.qk_row) normalise(DF_RMSNORM, gain, spec.norm_eps, row, heads * H, row);
            for (float *x = row; x < row + heads * H; x += H) {
                if (gain.gain && !spec.qk_row) normalise(DF_RMSNORM, gain, spec.norm_eps, x, H, x);
                if (cosines) rotate_head(x, H, cosines, sines);
            }
        };
        turn_heads(q, spec.heads, gain_of(f.flow(row), l, &DfLayer::q_norm, &DfAuxLayer::q_norm));
        for (int i = 0; i < NH; i += 16) put(rooms.query_f.data(), rooms.query_b.data(), bf16, (size_t)row * NH + i, load<f16x>(q + i));
        if (row >= f.T) continue;
        turn_heads(k, spec.kv_heads, layer_spec[l].k_norm);
        for (int n = 0; f.s.slot[row] >= 0 && n < spec.kv_heads; n++) {
            write_cache(cache, l, f.s.slot[row], 0, n, k + n * H);
            write_cache(cache, l, f.s.slot[row], 1, n, v + n * H);
        }
    }
}

// Attention as independent pieces: lanes of one sequence and kv head; where there are few of them, every
// chunk of the context is a piece, and the chunks are joined afterwards.
inline void NativeModel::plan_attention(Frame &f) {
    tasks.clear();
    int group = spec.heads / spec.kv_heads;
    bool split = pool->size() > 1 && f.s.sequences * spec.kv_heads < 4 * pool->size();
    for (int b = 0; b < f.s.sequences; b++) {
        int row = b ? f.s.row_end[b - 1] : 0, rows = f.s.row_end[b] - row;
        int aux = b && f.flows ? f.s.aux_end[b - 1] : 0, each = f.flows ? f.s.aux_end[b] - aux : 0;
        int lanes = (rows + f.flows * each) * group, keys = 0;
        for (int r = row; r < row + rows; r++) keys = std::max(keys, f.s.position[r] + 1);
        for (int a = aux; a < aux + each; a++) keys = std::max(keys, f.s.aux_position[a] + 1);
        int chunks = ceil_div(keys, CHUNK), parts = split && lanes <= LANES && chunks > 1 ? chunks : 0;
        for (int head = 0; head < spec.kv_heads; head++)
            for (int lane = 0; lane < lanes; lane += LANES) {
                int count = std::min(LANES, lanes - lane);
                if (!parts) tasks.push_back({b, head, lane, count, 0, keys, 0});
                for (int p = 0; p < parts; p++)
                    tasks.push_back({b, head, lane, count, p * CHUNK, std::min(keys, (p + 1) * CHUNK), p ? 1 : parts});
            }
    }
    size_t partial = tasks.size() * LANES;
    if (rooms.part.size() < partial * spec.head_dim) rooms.part.resize(partial * spec.head_dim);
    if (rooms.part_top.size() < partial) rooms.part_top.resize(partial), rooms.part_total.resize(partial);
    pool->reset();
}

// The row of the step that a lane of a sequence belongs to: primary rows first, then flow by flow.
inline int NativeModel::row_of(Frame &f, const AttentionTask &task, int lane) {
    int b = task.sequence, first = b ? f.s.row_end[b - 1] : 0, rows = f.s.row_end[b] - first;
    int r = (task.lane + lane) / (spec.heads / spec.kv_heads);
    if (r < rows) return first + r;
    int begin = b ? f.s.aux_end[b - 1] : 0, each = f.s.aux_end[b] - begin;
    return f.T + (r - rows) / each * f.A + begin + (r - rows) % each;
}

// One piece: every chunk of its keys, joined into `out` [lanes, H].
inline void NativeModel::attend_task(Frame &f, int l, const AttentionTask &task, AttentionScratch &s, float *out, float *top, float *total) {
    int group = spec.heads / spec.kv_heads, H = spec.head_dim, furthest = 0, window = layer_spec[l].window, begin = INT32_MAX;
    bool bf16 = DF_DOT_BF16 && spec.kv_format != DF_F32;
    for (int lane = 0; lane < task.lanes; lane++) {
        int row = row_of(f, task, lane);
        size_t from = (size_t)row * NH + (task.head * group + (task.lane + lane) % group) * H;
        if (bf16) memcpy(&s.query_b[(size_t)lane * H], &rooms.query_b[from], 2 * H);
        else memcpy(&s.query_f[(size_t)lane * H], &rooms.query_f[from], 4 * H);
        s.limit[lane] = *f.position(row) + 1;
        s.begin[lane] = window ? std::max(0, s.limit[lane] - window) : 0;
        furthest = std::max(furthest, s.limit[lane]), begin = std::min(begin, s.begin[lane]);
        top[lane] = -INFINITY, total[lane] = 0;
    }
    memset(out, 0, sizeof(float) * task.lanes * H);
    LaneBlock b{l, task.head, task.lanes, s.limit.data(), s.begin.data(), spec.attention_scale, spec.attention_softcap, {}, f.s.page + f.s.page_begin[task.sequence], 0, 0};
    b.query = Operand{bf16 ? nullptr : s.query_f.data(), bf16 ? s.query_b.data() : nullptr, H};
    int end = std::min(task.end_key, furthest), Z = spec.page_size;
    // Chunks are cut at the same places; of the first one, pages that no lane sees are left out.
    for (int next, key = std::max(task.first_key, begin / Z * Z); key < end; key = next) {
        next = (key / CHUNK + 1) * CHUNK;
        b.first_key = key, b.end_key = ceil_div(std::min(end, next), Z) * Z;
        attend_block(cache, b, s.out.data(), H, s.top.data(), s.total.data(), s);
        for (int lane = 0; lane < task.lanes; lane++) {
            size_t at = (size_t)lane * H;
            join_chunk(H, out + at, top[lane], total[lane], &s.out[at], s.top[lane], s.total[lane]);
        }
    }
}

inline void NativeModel::attend(Frame &f, int l, int t) {
    int group = spec.heads / spec.kv_heads, H = spec.head_dim, count = (int)tasks.size();
    bool bf16 = reads_bf16(layers[l].o.format), joined = false;
    auto finish = [&](const AttentionTask &task, float *out, const float *total) {
        for (int lane = 0; lane < task.lanes; lane++) {
            int head = task.head * group + (task.lane + lane) % group;
            size_t at = (size_t)row_of(f, task, lane) * out_ld + head * H;
            float scale = 1 / total[lane];
            for (int i = 0; i < H; i += 16)
                put(rooms.out_f.data(), rooms.out_b.data(), bf16, at + i, load<f16x>(out + (size_t)lane * H + i) * scale);
        }
    };
    auto part = [&](int i) { return &rooms.part[(size_t)i * LANES * H]; };
    auto top = [&](int i) { return &rooms.part_top[(size_t)i * LANES]; };
    auto total = [&](int i) { return &rooms.part_total[(size_t)i * LANES]; };
    for (const auto &task : tasks) joined |= task.parts > 0;
    for (int i = pool->take(); i < count; i = pool->take()) {
        attend_task(f, l, tasks[i], thread_rooms[t].attention, part(i), top(i), total(i));
        if (!tasks[i].parts) finish(tasks[i], part(i), total(i));
    }
    pool->barrier();
    if (t == 0) pool->reset();
    if (!joined) return;
    for (int i = 0, turn = 0; i < count; i++) {
        if (tasks[i].first_key || !tasks[i].parts || turn++ % pool->size() != t) continue;
        for (int p = 1; p < tasks[i].parts; p++)
            for (int lane = 0; lane < tasks[i].lanes; lane++) {
                const float *next = part(i + p) + (size_t)lane * H;
                join_chunk(H, part(i) + (size_t)lane * H, top(i)[lane], total(i)[lane], next, top(i + p)[lane], total(i + p)[lane]);
            }
        finish(tasks[i], part(i), total(i));
    }
}

}  // namespace
