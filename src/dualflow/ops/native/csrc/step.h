// One step of a model: T primary rows and flows x A auxiliary rows through every layer, the mathematics of
// model/layer.py in the same order. Threads own columns of every matrix and meet at barriers.
#pragma once
#include "model.h"

namespace {

// Up to this many rows every thread makes the normalised rows for itself, which is cheaper than waiting.
constexpr int OWN_NORM_ROWS = 4;

DF_INLINE void put(float *f, uint16_t *b, bool bf16, size_t at, f16x v) {
    if (bf16) store_bf16(b + at, v);
    else store(f + at, v);
}

DF_INLINE f16x logistic(f16x x) {  // e^87 is as much as there is
    f16x most = all(87.0f);
    return 1.0f / (exponential(where_above(-x, most, most, -x)) + 1.0f);
}
DF_INLINE f16x gelu(f16x x) { return x * logistic(1.5957691216057308f * (x + 0.044715f * x * x * x)); }

// act(gate) * up, or act(up) where there is no gate.
DF_INLINE f16x activate(int kind, f16x gate, f16x up) {
    switch (kind) {
        case DF_SWIGLU: return gate * logistic(gate) * up;
        case DF_GEGLU: return gelu(gate) * up;
        case DF_GELU: return gelu(up);
        default: {
            f16x x = bigger(up, zeros());
            return x * x;
        }
    }
}

// Norms of `width` features; `x` may be read and `out` written up to the next multiple of 16.
inline void normalise(int kind, const DfGain &g, float eps, const float *x, int width, float *out) {
    float mean = 0, square = 0;
    int whole = width / 16 * 16;
    auto total = [&](auto value) {
        f16x sums = zeros();
        for (int i = 0; i < whole; i += 16) sums += value(load<f16x>(x + i));
        float rest = sum(sums);
        for (int i = whole; i < width; i++) rest += value(all(x[i]))[0];
        return rest;
    };
    if (kind == DF_LAYERNORM) mean = total([](f16x v) { return v; }) / width;
    square = total([&](f16x v) { return (v - mean) * (v - mean); });
    float scale = 1 / sqrtf(square / width + eps);
    for (int i = 0; i < width; i++) out[i] = (x[i] - mean) * scale * g.gain[i] + (g.bias ? g.bias[i] : 0);
}

// What df_step and its kin (kernels.cpp) hand over to.
struct NativeModel {
    DfModelSpec spec;
    std::vector<DfLayer> layer_spec;
    std::vector<DfAuxLayer> aux_layer;
    std::vector<DfMatrix> aux_embed;
    std::vector<DfGain> aux_final_norm;
    std::vector<DfOwn> aux_head;
    std::vector<LayerWeights> layers;
    std::vector<FlowWeights> flow_layers;  // [flows][layers]
    std::vector<OwnWeights> flow_heads;    // [flows]
    Packed head;
    Cache cache{};
    df::Memory weights, cache_memory;
    std::unique_ptr<df::Pool> pool;
    Rooms rooms;
    std::vector<ThreadRoom> thread_rooms;
    std::vector<AttentionTask> tasks;
    float alpha_weight[3] = {};
    int D, NH, KH, F, QKV, inner_ld, width_ld, out_ld;
    int low_ld = 0;     // the most that low-rank additions to a matrix have between their two products
    int kept_rows = 0;  // rows of the last step that kept its intermediates

    explicit NativeModel(const DfModelSpec &s);
    void step(const DfStep &s);

  private:
    struct Frame;  // one step's sizes, see below
    void plan_weights();
    void fill_weights(int t);
    template <class Act> void each_own(Act act);
    template <class Own> const float *low_rank_rows(const Split &rows, const Operand &x, Own own, int t);
    template <class Own, class Emit>
    void project(const Split &rows, const Operand &x, const Packed &shared, Own own, int begin, int end, bool pairs, int t, Emit emit);
    auto own_of(OwnWeights FlowWeights::*part, int l) const {  // what each flow owns of a layer's matrix
        return [this, part, l](int flow) -> const OwnWeights & { return flow_layers[(size_t)flow * spec.layers + l].*part; };
    }
    const DfGain &gain_of(int flow, int l, DfGain DfLayer::*shared, DfGain DfAuxLayer::*own) const;
    void norm_outputs(Frame &f, int l, DfGain DfLayer::*shared, DfGain DfAuxLayer::*own, bool add, int t);
    void body(Frame &f, int t);
    void embed(Frame &f, int t);
    void layer(Frame &f, int l, int t);
    Operand norm_rows(Frame &f, int l, bool mlp, int format, int t);
    void couple(Frame &f, int begin, int end, const float *DfAuxLayer::*vector, int l, float *x, int ld, std::vector<float> &kept, int width);
    void rotate_and_write(Frame &f, int l, int t);
    void plan_attention(Frame &f);
    void attend(Frame &f, int l, int t);
    void attend_task(Frame &f, int l, const AttentionTask &task, AttentionScratch &s, float *out, float *top, float *total);
    int row_of(Frame &f, const AttentionTask &task, int lane);
    void mlp(Frame &f, int l, int t);
    void couple_inner(Frame &f, int l, int begin, int end, bool bf16);
    void read_out(Frame &f, int t);
    template <class Target> void distributions(Frame &f, int t, int begin, int end, Target target);
    template <class EachBlock, class Cell, class Each, class Take, class Give>
    void mix_row(Frame &f, int t, int i, EachBlock each_block, Cell cell, Each each, Take take, Give give);
};

struct NativeModel::Frame {
    const DfStep &s;
    int T, A, flows, R, reads;
    Split split() const { return {T, A, flows}; }
    const int32_t *position(int row) const { return row < T ? s.position + row : s.aux_position + (row - T) % A; }
    int flow(int row) const { return row < T ? -1 : (row - T) / A; }
    int pin(int aux) const { return s.aux_pin[aux]; }
};

inline NativeModel::NativeModel(const DfModelSpec &s) : spec(s) {
    D = s.width, NH = s.heads * s.head_dim, KH = s.kv_heads * s.head_dim, F = s.inner, QKV = NH + 2 * KH;
    width_ld = padded(D), out_ld = padded(NH), inner_ld = padded(F);
    layer_spec.assign(s.layer, s.layer + s.layers);
    aux_layer.assign(s.aux_layer, s.aux_layer + (size_t)s.flows * s.layers);
    aux_embed.assign(s.aux_embed, s.aux_embed + s.flows);
    aux_final_norm.assign(s.aux_final_norm, s.aux_final_norm + s.flows);
    aux_head.assign(s.aux_head, s.aux_head + s.flows);
    if (s.alpha_weight) memcpy(alpha_weight, s.alpha_weight, sizeof alpha_weight);
    pool = std::make_unique<df::Pool>(s.threads);
    thread_rooms.resize(s.threads);
    for (auto &room : thread_rooms) {
        room.attention.reserve(s.head_dim, s.page_size);
        room.norm_f.resize((size_t)OWN_NORM_ROWS * width_ld), room.norm_b.resize((size_t)OWN_NORM_ROWS * width_ld);
    }

    plan_weights();
    cache.format = s.kv_format, cache.pages = s.pages, cache.page_size = s.page_size;
    cache.kv_heads = s.kv_heads, cache.head_dim = s.head_dim, cache.layers = s.layers;
    cache.block_bytes = (size_t)s.page_size * s.head_dim * (s.kv_format == DF_F32 ? 4 : s.kv_format == DF_BF16 ? 2 : 1);
    uint8_t *kv = cache_memory.allocate(cache.bytes() + 64);
    cache.data = kv;
    cache.scale = (float *)(kv + cache.index(s.layers, 0, 0, 0) * cache.block_bytes);
    pool->run([&](int t) { fill_weights(t); });
}

// Gate and up, or up alone.
inline std::vector<const DfMatrix *> gate_up(const DfLayer &l) {
    return l.gate.data ? std::vector<const DfMatrix *>{&l.gate, &l.up} : std::vector<const DfMatrix *>{&l.up};
}

// Gives every packed matrix its place.
inline void NativeModel::plan_weights() {
    Packer packer;
    layers.resize(spec.layers);
    for (int i = 0; i < spec.layers; i++) {
        const DfLayer &l = layer_spec[i];
        layers[i] = {packer.plan({&l.q, &l.k, &l.v}), packer.plan({&l.o}), packer.plan(gate_up(l)), packer.plan({&l.down})};
    }
    head = packer.plan({&spec.head});
    flow_layers.resize(aux_layer.size()), flow_heads.resize(spec.flows);
    each_own([&](OwnWeights &w, const std::vector<const DfOwn *> &own, int) {
        w = {packer.plan_some(parts_of(own, &DfOwn::whole)), packer.plan_some(parts_of(own, &DfOwn::a)), packer.plan_some(parts_of(own, &DfOwn::b))};
        low_ld = std::max(low_ld, w.rank_ld());
    });
    for (auto &room : thread_rooms) room.low.resize((size_t)OWN_NORM_ROWS * low_ld);
    uint8_t *base = weights.allocate(packer.bytes() + 64);
    for (auto &l : layers)
        for (Packed *w : {&l.qkv, &l.o, &l.gate_up, &l.down}) Packer::settle(*w, base);
    Packer::settle(head, base);
    each_own([&](OwnWeights &w, const std::vector<const DfOwn *> &, int) {
        for (Packed *part : {&w.whole, &w.a, &w.b}) Packer::settle(*part, base);
    });
}

// Packs what thread t will read.
inline void NativeModel::fill_weights(int t) {
    int threads = pool->size(), unit = layer_spec[0].gate.data ? 2 : 1;
    for (int i = 0; i < spec.layers; i++) {
        const DfLayer &l = layer_spec[i];
        fill(layers[i].qkv, {&l.q, &l.k, &l.v}, false, 1, t, threads);
        fill(layers[i].o, {&l.o}, false, 1, t, threads);
        fill(layers[i].gate_up, gate_up(l), true, unit, t, threads);
        fill(layers[i].down, {&l.down}, false, 1, t, threads);
    }
    fill(head, {&spec.head}, false, BLOCK / STRIP, t, threads);
    each_own([&](OwnWeights &w, const std::vector<const DfOwn *> &own, int share) {
        fill(w.whole, parts_of(own, &DfOwn::whole), true, share, t, threads);
        fill(w.a, parts_of(own, &DfOwn::a), false, 1, t, threads);
        fill(w.b, parts_of(own, &DfOwn::b), true, share, t, threads);
    });
}

inline void NativeModel::step(const DfStep &s) {
    Frame f{s, s.tokens, s.aux, s.aux ? spec.flows : 0, s.tokens + (s.aux ? spec.flows : 0) * s.aux, s.reads};
    size_t R = f.R;
    auto grow = [](auto &v, size_t n) { if (v.size() < n) v.resize(n); };
    grow(rooms.h, R * D);
    grow(rooms.qkv, R * QKV);
    grow(rooms.y, R * D);
    for (auto *v : {&rooms.norm_f, &rooms.hidden_f}) grow(*v, R * width_ld);
    for (auto *v : {&rooms.norm_b, &rooms.hidden_b}) grow(*v, R * width_ld);
    grow(rooms.out_f, R * out_ld), grow(rooms.out_b, R * out_ld);
    grow(rooms.query_f, R * NH), grow(rooms.query_b, R * NH);
    grow(rooms.inner_f, R * inner_ld), grow(rooms.inner_b, R * inner_ld);
    if (s.keep) {
        kept_rows = s.reads;
        size_t rows = (size_t)spec.layers * s.reads;
        grow(rooms.kept_q, rows * NH), grow(rooms.kept_u, rows * F), grow(rooms.kept_y, rows * D);
    }
    grow(rooms.low, (R - f.T) * low_ld);
    grow(rooms.flows, (size_t)std::max(0, f.flows - 1) * s.aux * spec.vocab);
    grow(rooms.reduce, (size_t)(s.reads + f.flows * s.aux) * 8 * ceil_div(spec.vocab, BLOCK));
    plan_attention(f);
    pool->run([&](int t) { body(f, t); });
}

inline void NativeModel::body(Frame &f, int t) {
    embed(f, t);
    pool->barrier();
    for (int l = 0; l < spec.layers; l++) layer(f, l, t);
    read_out(f, t);
}

// Rows begin as their embeddings. A page whose first slot will be written is cleared: what another sequence
// left there stays behind the mask, but zero times NaN is NaN.
inline void NativeModel::embed(Frame &f, int t) {
    for (int row = t; row < f.T; row += pool->size()) {
        int slot = f.s.slot[row], page = slot / spec.page_size;
        if (slot < 0 || slot % spec.page_size) continue;
        cache.each([&](int layer, int kind, int head) {
            memset(cache.block(layer, page, kind, head), 0, cache.block_bytes);
            if (cache.format == DF_INT8) memset(cache.scales(layer, page, kind, head), 0, sizeof(float) * spec.page_size);
        });
    }
    for (int row = t; row < f.R; row += pool->size()) {
        float *h = rooms.h.data() + (size_t)row * D;
        int flow = f.flow(row), token = row < f.T ? f.s.token[row] : f.s.aux_token[(row - f.T) % f.A];
        read_row(flow < 0 ? spec.embed : aux_embed[flow], token, h);
        for (int i = 0; spec.embed_scale != 1 && i < D; i++) h[i] *= spec.embed_scale;
        if (!spec.embed_positions) continue;
        const float *position = (const float *)spec.embed_positions + (size_t)*f.position(row) * D;
        for (int i = 0; i < D; i++) h[i] += position[i];
    }
}

// The gain of a layer's norm for rows of a flow: its own, or the shared one.
inline const DfGain &NativeModel::gain_of(int flow, int l, DfGain DfLayer::*shared, DfGain DfAuxLayer::*own) const {
    if (flow < 0) return layer_spec[l].*shared;
    const DfGain &gain = aux_layer[(size_t)flow * spec.layers + l].*own;
    return gain.gain ? gain : layer_spec[l].*shared;
}

// Norms every row of y in its place, and adds it to h where that is asked for.
inline void NativeModel::norm_outputs(Frame &f, int l, DfGain DfLayer::*shared, DfGain DfAuxLayer::*own, bool add, int t) {
    for (int row = t; row < f.R; row += pool->size()) {
        float *y = rooms.y.data() + (size_t)row * D, *h = rooms.h.data() + (size_t)row * D;
        normalise(spec.norm, gain_of(f.flow(row), l, shared, own), spec.norm_eps, y, D, y);
        for (int i = 0; add && i < D; i++) h[i] += y[i];
    }
    pool->barrier();
}

// The rows that a matrix of `format` reads, normalised where the layer norms them there.
inline Operand NativeModel::norm_rows(Frame &f, int l, bool mlp, int format, int t) {
    bool bf16 = reads_bf16(format), alone = f.R <= OWN_NORM_ROWS;
    float *out_f = alone ? thread_rooms[t].norm_f.data() : rooms.norm_f.data();
    uint16_t *out_b = alone ? thread_rooms[t].norm_b.data() : rooms.norm_b.data();
    float buffer[width_ld + 16];
    memset(buffer, 0, sizeof(float) * (width_ld + 16));
    for (int row = alone ? 0 : t; row < f.R; row += alone ? 1 : pool->size()) {
        const float *h = rooms.h.data() + (size_t)row * D;
        const DfGain &gain = mlp ? gain_of(f.flow(row), l, &DfLayer::mlp_norm, &DfAuxLayer::mlp_norm)
                                 : gain_of(f.flow(row), l, &DfLayer::attention_norm, &DfAuxLayer::attention_norm);
        if (gain.gain) normalise(spec.norm, gain, spec.norm_eps, h, D, buffer);
        else memcpy(buffer, h, sizeof(float) * D);
        for (int i = 0; i < width_ld; i += 16) put(out_f, out_b, bf16, (size_t)row * width_ld + i, load<f16x>(buffer + i));
    }
    if (!alone) pool->barrier();
    return Operand{bf16 ? nullptr : out_f, bf16 ? out_b : nullptr, width_ld};
}

// Adds vector * (primary's value at the pinned row) to the auxiliary rows, columns [begin, end); keeps the
// primary's values of the read rows where a later pass needs them.
inline void NativeModel::couple(Frame &f, int begin, int end, const float *DfAuxLayer::*vector, int l, float *x, int ld, std::vector<float> &kept, int width) {
    if (begin >= end) return;
    for (int i = 0; f.s.keep && i < f.reads; i++)
        memcpy(kept.data() + ((size_t)l * f.reads + i) * width + begin, x + (size_t)f.s.read[i] * ld + begin, sizeof(float) * (end - begin));
    for (int flow = 0; flow < f.flows; flow++) {
        const float *v = aux_layer[(size_t)flow * spec.layers + l].*vector;
        for (int a = 0; v && a < f.A; a++) {
            float *row = x + (size_t)(f.T + flow * f.A + a) * ld;
            const float *primary = f.T ? x + (size_t)f.pin(a) * ld : kept.data() + ((size_t)l * kept_rows + f.pin(a)) * width;
            for (int c = begin; c < end; c++) row[c] += v[c] * primary[c];
        }
    }
}

}  // namespace
