// The kernels without Python: for sanitizers, other compilers and other machines (docs/kernels.md, "Checking").
//
//   driver FILE            runs everything and writes what came out
//   driver FILE REFERENCE  also compares with what another build of it wrote
//
// Checks by itself: every product against one in double precision, and that a sequence's distributions are
// bit-equal whatever the threads, the chunks of its prompt and its neighbours in a step.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "api.h"

namespace {

int failures = 0;
#define CHECK(condition, ...)                              \
    do {                                                   \
        if (!(condition)) {                                \
            failures++;                                    \
            fprintf(stderr, "%s: ", #condition);           \
            fprintf(stderr, __VA_ARGS__), fputc('\n', stderr); \
        }                                                  \
    } while (0)

struct Random {  // the same numbers on every machine
    uint64_t state;
    uint32_t next() {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        return (uint32_t)(state >> 32);
    }
    int below(int n) { return (int)(next() % (uint32_t)n); }
    float number() { return (float)((int)(next() >> 8) - (1 << 23)) / (1 << 23); }  // in [-1, 1)
};

uint16_t bf16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
float widened(uint16_t x) {
    uint32_t u = (uint32_t)x << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
// Scales are powers of two times 1 + 1/4, exact in float16.
uint16_t half(int exponent, bool negative) { return (uint16_t)((negative ? 0x8000 : 0) | (exponent + 15) << 10 | 256); }
float half_value(int exponent, bool negative) { return (negative ? -1.25f : 1.25f) * ldexpf(1, exponent); }

// A random matrix with what it means in double precision.
struct Matrix {
    std::vector<uint8_t> data;
    std::vector<uint16_t> scale, minimum;
    std::vector<float> bias;
    std::vector<double> meaning;
    DfMatrix c{};

    Matrix() = default;
    Matrix(int format, int n, int k, Random &random, bool with_bias, float size) {
        int groups = (k + 31) / 32, step = (k + 1) / 2, exponent = (int)floorf(log2f(size)) - (format == DF_INT8 ? 7 : 3);
        meaning.resize((size_t)n * k);
        data.resize((size_t)n * (format == DF_F32 ? 4 * k : format == DF_BF16 ? 2 * k : format == DF_INT8 ? k : step));
        for (int i = 0; format >= DF_INT8 && i < n * groups; i++) scale.push_back(half(exponent, false)), minimum.push_back(half(exponent + 2, true));
        for (int r = 0; r < n; r++)
            for (int i = 0; i < k; i++) {
                size_t at = (size_t)r * k + i;
                float x = random.number() * size;
                if (format == DF_F32) memcpy(&data[4 * at], &x, 4), meaning[at] = x;
                uint16_t rounded = bf16(x);
                if (format == DF_BF16) memcpy(&data[2 * at], &rounded, 2), meaning[at] = widened(rounded);
                int code = format == DF_INT8 ? random.below(255) - 127 : random.below(16);
                if (format == DF_INT8) data[at] = (uint8_t)(int8_t)code, meaning[at] = code * (double)half_value(exponent, false);
                if (format == DF_INT4) {
                    data[(size_t)r * step + i / 2] |= (uint8_t)(i % 2 ? code << 4 : code);
                    meaning[at] = code * (double)half_value(exponent, false) + half_value(exponent + 2, true);
                }
            }
        for (int r = 0; with_bias && r < n; r++) bias.push_back(random.number());
        c = {format, n, k, data.data(), scale.data(), minimum.data(), with_bias ? bias.data() : nullptr};
    }
};

void check_products() {
    Random random{42};
    const int sizes[][2] = {{1, 1}, {5, 7}, {16, 32}, {33, 31}, {100, 65}, {47, 130}, {200, 96}};
    for (int format = 0; format < 4; format++)
        for (auto [n, k] : sizes)
            for (int rows : {1, 2, 3, 7, 13}) {
                Matrix m(format, n, k, random, rows % 2, 1);
                std::vector<float> x((size_t)rows * k), y((size_t)rows * n, NAN);
                for (auto &v : x) v = random.number();
                df_matmul(&m.c, x.data(), rows, y.data(), 1 + rows % 3, 1);
                for (int r = 0; r < rows; r++)
                    for (int o = 0; o < n; o++) {
                        double sum = rows % 2 ? m.bias[o] : 0, size = fabs(sum);
                        for (int i = 0; i < k; i++) {
                            double term = m.meaning[(size_t)o * k + i] * x[(size_t)r * k + i];
                            sum += term, size += fabs(term);
                        }
                        double error = fabs(y[(size_t)r * n + o] - sum), unit = format == DF_F32 ? 1e-6 : format == DF_BF16 ? 4e-3 : 2e-4;
                        CHECK(error <= unit * size + 1e-6, "format %d [%d, %d] row %d of %d output %d: off by %g", format, n, k, r, rows, o, error);
                    }
            }
}

enum Owning { NOTHING, WHOLE, LOW_RANK };

struct Shape {
    const char *name;
    int format, kv, flows, mlp, norm, readout, page_size;
    Owning owning = NOTHING;  // what every flow owns of every matrix
    bool switches = false;    // norms behind, windows, caps, scales, rows of heads
};

constexpr int VOCAB = 600, WIDTH = 48, HEADS = 4, KV_HEADS = 2, HEAD = 16, INNER = 80, LAYERS = 2, POSITIONS = 400, PAGES = 96, RANK = 5;

// A random model. Everything the kernels read lives here.
struct Model {
    Shape shape;
    Random random{7};
    std::vector<Matrix> matrices;
    std::vector<std::vector<float>> vectors;
    std::vector<DfLayer> layers;
    std::vector<DfAuxLayer> aux;
    std::vector<DfMatrix> tables;
    std::vector<DfGain> finals;
    std::vector<DfOwn> heads;
    DfModelSpec spec{};

    const float *vector(int n, float center) {
        std::vector<float> v;
        for (int i = 0; i < n; i++) v.push_back(center + 0.3f * random.number());
        return vectors.emplace_back(std::move(v)).data();
    }
    DfGain gain(int n) { return {vector(n, 1), shape.norm == DF_LAYERNORM ? vector(n, 0) : nullptr}; }
    DfMatrix matrix(int n, int k, bool bias, float size = 0) {
        matrices.emplace_back(shape.format, n, k, random, bias, size ? size : 1.7f / sqrtf((float)k));
        return matrices.back().c;
    }

    DfOwn own(int n, int k, bool bias) {
        DfOwn x{};
        if (shape.owning == WHOLE) x.whole = matrix(n, k, bias);
        if (shape.owning != LOW_RANK) return x;
        int format = shape.format == DF_BF16 ? DF_BF16 : DF_F32;
        x.a = matrices.emplace_back(format, RANK, k, random, false, 1.7f / sqrtf((float)k)).c;
        x.b = matrices.emplace_back(format, n, RANK, random, false, 0.3f).c;
        return x;
    }
    // Cosines and sines of all positions.
    void turns(double base, const float *&cosines, const float *&sines) {
        std::vector<float> c, s;
        for (int p = 0; p < POSITIONS; p++)
            for (int i = 0; i < HEAD / 2; i++) {
                double angle = p * pow(base, -2.0 * i / HEAD);
                c.push_back((float)cos(angle)), s.push_back((float)sin(angle));
            }
        cosines = vectors.emplace_back(std::move(c)).data(), sines = vectors.emplace_back(std::move(s)).data();
    }

    explicit Model(const Shape &s) : shape(s) {
        bool plain = s.norm == DF_LAYERNORM, gated = s.mlp <= DF_GEGLU, more = s.switches;
        for (int l = 0; l < LAYERS; l++) {
            DfLayer x{};
            x.attention_norm = gain(WIDTH), x.mlp_norm = gain(WIDTH);
            if (more) x.attention_output_norm = gain(WIDTH), x.mlp_output_norm = gain(WIDTH), x.window = l ? 0 : 21;
            if (!plain) x.q_norm = {vector(more ? HEADS * HEAD : HEAD, 1), nullptr}, x.k_norm = {vector(more ? KV_HEADS * HEAD : HEAD, 1), nullptr};
            x.q = matrix(HEADS * HEAD, WIDTH, plain), x.k = matrix(KV_HEADS * HEAD, WIDTH, plain);
            x.v = matrix(KV_HEADS * HEAD, WIDTH, plain), x.o = matrix(WIDTH, HEADS * HEAD, plain);
            if (gated) x.gate = matrix(INNER, WIDTH, false);
            x.up = matrix(INNER, WIDTH, plain), x.down = matrix(WIDTH, INNER, plain);
            layers.push_back(x);
        }
        for (int i = 0; i < s.flows * LAYERS; i++) {
            DfAuxLayer x{};
            x.query = vector(HEADS * HEAD, 0), x.intermediate = vector(INNER, 0), x.output = vector(WIDTH, 0);
            if (i % 2) x.attention_norm = gain(WIDTH);
            x.q = own(HEADS * HEAD, WIDTH, plain), x.o = own(WIDTH, HEADS * HEAD, plain);
            if (gated) x.gate = own(INNER, WIDTH, false);
            x.up = own(INNER, WIDTH, plain), x.down = own(WIDTH, INNER, plain);
            aux.push_back(x);
        }
        for (int i = 0; i < s.flows; i++) {
            tables.push_back(matrix(VOCAB, WIDTH, false, 1)), finals.push_back(i ? gain(WIDTH) : DfGain{});
            heads.push_back(own(VOCAB, WIDTH, false));
        }
        spec.vocab = VOCAB, spec.width = WIDTH, spec.heads = HEADS, spec.kv_heads = KV_HEADS, spec.head_dim = HEAD, spec.inner = INNER;
        spec.layers = LAYERS, spec.flows = s.flows, spec.positions = POSITIONS, spec.mlp = s.mlp, spec.norm = s.norm, spec.readout = s.readout;
        spec.qk_row = more, spec.norm_eps = 1e-6f, spec.embed_scale = more ? 1.5f : 1, spec.attention_scale = more ? 0.4f : 0.25f;
        spec.attention_softcap = more ? 2 : 0, spec.final_softcap = more ? 3 : 0;
        spec.page_size = s.page_size, spec.pages = PAGES, spec.kv_format = s.kv, spec.threads = 1;
        spec.final_norm = gain(WIDTH), spec.embed = matrix(VOCAB, WIDTH, false, 1), spec.head = matrix(VOCAB, WIDTH, false);
        if (plain) spec.embed_positions = vector(POSITIONS * WIDTH, 0);
        else turns(10000, spec.cosines, spec.sines);
        if (!plain && more) turns(100, spec.local_cosines, spec.local_sines);
        spec.layer = layers.data(), spec.aux_layer = aux.data(), spec.aux_embed = tables.data(), spec.aux_final_norm = finals.data();
        spec.aux_head = heads.data(), spec.alpha_weight = vector(3, 0);
    }
};

struct Text {
    std::vector<int32_t> tokens, pages;
    std::vector<float> log_r;  // [tokens, V], as positions are read
    int done = 0;
};

// Runs `counts` rows of every text in one step and reads all of them; `lazy`: auxiliary rows in a pass of their own.
void step(DfModel *model, const Shape &shape, std::vector<Text *> texts, const std::vector<int> &counts, bool lazy) {
    std::vector<int32_t> token, position, slot, row_end, page, page_begin{0}, read, index, none, ends_none;
    for (size_t b = 0; b < texts.size(); b++) {
        Text &t = *texts[b];
        for (int i = 0; i < counts[b]; i++) {
            int p = t.done + i;
            token.push_back(t.tokens[p]), position.push_back(p);
            slot.push_back(t.pages[p / shape.page_size] * shape.page_size + p % shape.page_size);
            index.push_back((int)read.size()), read.push_back((int)read.size()), none.push_back(-1);
        }
        row_end.push_back((int)token.size()), ends_none.push_back(0);
        page.insert(page.end(), t.pages.begin(), t.pages.end()), page_begin.push_back((int)page.size());
    }
    int rows = (int)token.size();
    bool aux = shape.flows > 0;
    std::vector<float> p((size_t)rows * VOCAB), q(p.size()), r(p.size()), alpha(rows), rest(rows), sureness(rows);
    std::vector<int32_t> best(rows);
    DfStep s{rows, aux && !lazy ? rows : 0, (int)texts.size(), rows, lazy, token.data(), position.data(), slot.data(),
             token.data(), position.data(), index.data(), row_end.data(), aux && !lazy ? row_end.data() : ends_none.data(), page.data(),
             page_begin.data(), read.data(), aux && !lazy ? index.data() : none.data(), p.data(), q.data(), r.data(), alpha.data(), rest.data(), sureness.data(), best.data()};
    df_step(model, &s);
    if (aux && lazy) {
        s.tokens = 0, s.aux = rows, s.keep = 0, s.row_end = ends_none.data(), s.aux_end = row_end.data(), s.aux_of_read = index.data();
        df_step(model, &s);
    }
    for (size_t b = 0, at = 0; b < texts.size(); b++) {
        Text &t = *texts[b];
        t.log_r.insert(t.log_r.end(), r.begin() + at * VOCAB, r.begin() + (at + counts[b]) * VOCAB);
        t.done += counts[b], at += counts[b];
    }
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < VOCAB; v++) CHECK(r[(size_t)i * VOCAB + v] <= r[(size_t)i * VOCAB + best[i]], "%s: best of row %d", shape.name, i);
}

std::vector<Text> new_texts(int page_size) {
    std::vector<Text> texts;
    int page = 0;
    for (int length : {300, 17, 40, 1}) {
        Random random{(uint64_t)length + 1};
        Text t;
        for (int i = 0; i < length; i++) t.tokens.push_back(random.below(VOCAB));
        // Pages lie apart, and not in order.
        for (int i = 0; i * page_size < length; i++, page++) t.pages.push_back((page * 37 + 5) % PAGES);
        texts.push_back(t);
    }
    return texts;
}

std::vector<float> run(Model &model, int threads, int chunk, bool alone, bool lazy) {
    model.spec.threads = threads;
    const char *error = nullptr;
    DfModel *handle = df_model_new(&model.spec, &error);
    CHECK(handle, "%s", error);
    auto texts = new_texts(model.shape.page_size);
    for (size_t i = 0; alone && i < texts.size(); i++)
        while (texts[i].done < (int)texts[i].tokens.size())
            step(handle, model.shape, {&texts[i]}, {std::min(chunk, (int)texts[i].tokens.size() - texts[i].done)}, lazy);
    for (bool more = !alone; more;) {
        std::vector<Text *> running;
        std::vector<int> counts;
        for (auto &t : texts)
            if (int left = (int)t.tokens.size() - t.done) running.push_back(&t), counts.push_back(std::min(left, chunk + (int)running.size()));
        if ((more = !running.empty())) step(handle, model.shape, running, counts, lazy);
    }
    df_copy_page(handle, 0, PAGES - 1);
    df_model_free(handle);
    std::vector<float> all;
    for (auto &t : texts) all.insert(all.end(), t.log_r.begin(), t.log_r.end());
    return all;
}

}  // namespace

int main(int count, char **arguments) {
    bool quick = getenv("DRIVER_QUICK") != nullptr;
    check_products();
    const Shape shapes[] = {
        {"standard float32", DF_F32, DF_F32, 0, DF_SWIGLU, DF_RMSNORM, DF_MIXTURE, 32},
        {"dual float32", DF_F32, DF_F32, 1, DF_SWIGLU, DF_RMSNORM, DF_MIXTURE, 16},
        {"dual bfloat16", DF_BF16, DF_BF16, 1, DF_GEGLU, DF_RMSNORM, DF_MIXTURE, 32},
        {"gpt2 int8", DF_INT8, DF_INT8, 1, DF_GELU, DF_LAYERNORM, DF_AUX_ONLY, 64},
        {"two flows int4", DF_INT4, DF_BF16, 2, DF_RELU2, DF_RMSNORM, DF_MIXTURE, 16},
        {"primary only", DF_INT8, DF_F32, 1, DF_SWIGLU, DF_RMSNORM, DF_PRIMARY_ONLY, 256},
        {"lora bfloat16", DF_BF16, DF_BF16, 1, DF_SWIGLU, DF_RMSNORM, DF_LEARNED, 32, LOW_RANK, true},
        {"lora int4", DF_INT4, DF_F32, 2, DF_GEGLU, DF_RMSNORM, DF_LEARNED, 16, LOW_RANK},
        {"owning float32", DF_F32, DF_F32, 2, DF_GELU, DF_LAYERNORM, DF_MIXTURE, 32, WHOLE, true},
        {"owning int8", DF_INT8, DF_INT8, 1, DF_SWIGLU, DF_RMSNORM, DF_MIXTURE, 64, WHOLE},
    };
    std::vector<float> everything;
    for (const Shape &shape : shapes) {
        Model model(shape);
        auto whole = run(model, 1, 300, false, false);
        for (float v : whole) CHECK(!std::isnan(v), "%s: NaN", shape.name);
        struct { int threads, chunk; bool alone, lazy; } ways[] = {{2, 300, true, false}, {3, 61, false, true}, {2, 5, false, false}, {1, 13, true, true}};
        for (auto way : ways) {
            if (quick && way.chunk < 60) continue;
            auto other = run(model, way.threads, way.chunk, way.alone, way.lazy);
            float worst = 0;
            for (size_t i = 0; i < whole.size(); i++) worst = fmaxf(worst, fabsf(whole[i] - other[i]));
            CHECK(whole == other, "%s: %d threads, chunks of %d%s%s: off by %g", shape.name, way.threads, way.chunk, way.alone ? ", alone" : "", way.lazy ? ", lazy" : "", worst);
        }
        everything.insert(everything.end(), whole.begin(), whole.end());
    }
    if (count > 1)
        if (FILE *file = fopen(arguments[1], "wb")) {
            fwrite(everything.data(), sizeof(float), everything.size(), file);
            fclose(file);
        }
    if (count > 2)
        if (FILE *file = fopen(arguments[2], "rb")) {
            std::vector<float> reference(everything.size());
            CHECK(fread(reference.data(), sizeof(float), reference.size(), file) == reference.size(), "the reference is shorter");
            fclose(file);
            size_t at = 0, each = everything.size() / std::size(shapes);
            for (const Shape &shape : shapes) {
                double worst = 0, square = 0;
                for (size_t i = 0; i < each; i++, at++) {
                    double d = fabs(everything[at] - reference[at]);
                    worst = fmax(worst, d), square += d * d;
                }
                printf("%-18s against the reference: worst %.2e, root mean square %.2e\n", shape.name, worst, sqrt(square / each));
                CHECK(worst < (shape.format == DF_F32 && shape.kv == DF_F32 ? 2e-4 : 0.2), "%s", shape.name);
            }
        }
    printf("%s: %d failures\n", df_isa(), failures);
    return failures ? 1 : 0;
}
