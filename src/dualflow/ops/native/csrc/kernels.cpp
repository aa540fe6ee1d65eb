// The library's face. It is compiled once for every instruction set, each into a library of its own, so
// that no function of one can be taken for that of another; library.py loads the best the machine runs.
#include "readout.h"

#ifndef DF_ISA
#define DF_ISA "baseline"
#endif

struct DfModel {
    NativeModel model;
    explicit DfModel(const DfModelSpec &spec) : model(spec) {}
};

static const char *refuse(const DfModelSpec &s) {
    if (s.head_dim % 16 || s.width % 16 || s.inner % 16) return "sizes must be multiples of 16";
    if (s.page_size < 16 || CHUNK % s.page_size) return "the page size must be 16, 32, 64, 128 or 256";
    if (s.kv_format == DF_INT4 || s.kv_format < 0) return "the cache is float32, bfloat16 or int8";
    if (s.threads < 1) return "at least one thread is needed";
    return nullptr;
}

extern "C" {

#define DF_PUBLIC __attribute__((visibility("default")))

DF_PUBLIC const char *df_isa(void) { return DF_ISA; }

DF_PUBLIC int32_t df_layout(void) {
    size_t number = 0;
    for (size_t bytes : {sizeof(DfModelSpec), sizeof(DfLayer), sizeof(DfAuxLayer), sizeof(DfStep)}) number = number * 61 + bytes / 4;
    return (int32_t)(number % 0x7fffffff);
}

DF_PUBLIC const char *df_best_isa(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("avx512dq");
    if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) return "avx512bf16";
    if (avx512) return "avx512";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
    return "baseline";
}

DF_PUBLIC DfModel *df_model_new(const DfModelSpec *spec, const char **error) {
    *error = refuse(*spec);
    if (*error) return nullptr;
    try {
        return new DfModel(*spec);
    } catch (const std::bad_alloc &) {
        *error = "not enough memory for the packed weights and the cache";
    } catch (const std::exception &) {
        *error = "the threads could not be started";
    }
    return nullptr;
}

DF_PUBLIC void df_model_free(DfModel *m) { delete m; }
DF_PUBLIC int64_t df_model_weight_bytes(const DfModel *m) { return (int64_t)m->model.weights.size(); }
DF_PUBLIC int64_t df_model_cache_bytes(const DfModel *m) { return (int64_t)m->model.cache.bytes(); }
DF_PUBLIC void df_step(DfModel *m, const DfStep *step) { m->model.step(*step); }

DF_PUBLIC void df_copy_page(DfModel *m, int32_t source, int32_t target) {
    const Cache &c = m->model.cache;
    c.each([&](int layer, int kind, int head) {
        memcpy(c.block(layer, target, kind, head), c.block(layer, source, kind, head), c.block_bytes);
        if (c.format == DF_INT8)
            memcpy(c.scales(layer, target, kind, head), c.scales(layer, source, kind, head), sizeof(float) * c.page_size);
    });
}

DF_PUBLIC void df_matmul(const DfMatrix *m, const float *x, int32_t rows, float *y, int32_t threads, int32_t repeats) {
    df::Pool pool(threads);
    df::Memory memory;
    Packer packer;
    Packed w = packer.plan({m});
    Packer::settle(w, memory.allocate(packer.bytes() + 64));
    int ld = padded(m->k);
    bool bf16 = reads_bf16(m->format);
    std::vector<float> f((size_t)rows * ld);
    std::vector<uint16_t> b(f.size());
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < m->k; i++) f[(size_t)r * ld + i] = x[(size_t)r * m->k + i], b[(size_t)r * ld + i] = to_bf16(x[(size_t)r * m->k + i]);
    Operand operand{bf16 ? nullptr : f.data(), bf16 ? b.data() : nullptr, ld};
    pool.run([&](int t) {
        fill(w, {m}, false, 1, t, threads);
        MatmulScratch scratch;
        int begin, end;
        share_of(w.strips, 1, t, threads, begin, end);
        auto emit = [&](int row, int strip, const f16x *v) {
            int column = strip * STRIP;
            memcpy(y + (size_t)row * m->n + column, v, sizeof(float) * std::min(STRIP, m->n - column));
        };
        for (int i = 0; i < repeats; i++) {
            pool.barrier();
            matmul(operand, rows, w, begin, end, scratch, false, emit);
        }
    });
}

}  // extern "C"
