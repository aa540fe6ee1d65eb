// The C interface between Python (ctypes, library.py) and the kernels. Every struct here has a twin
// there, field by field. Letters as in docs/shapes.md. Nothing here allocates what Python must free,
// except a model's handle.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum DfFormat { DF_F32 = 0, DF_BF16 = 1, DF_INT8 = 2, DF_INT4 = 3 };
enum DfMlp { DF_SWIGLU = 0, DF_GEGLU = 1, DF_GELU = 2, DF_RELU2 = 3 };
enum DfNorm { DF_RMSNORM = 0, DF_LAYERNORM = 1 };
enum DfReadout { DF_MIXTURE = 0, DF_AUX_ONLY = 1, DF_PRIMARY_ONLY = 2, DF_LEARNED = 3 };

// A matrix as PyTorch holds it, [n, k] row by row, in one of the formats; bias [n] or null.
// int8: codes [n, k], scale float16 [n, ceil(k / 32)]. int4: two codes a byte, the even input in the
// low half, [n, ceil(k / 2)], scale and minimum float16.
typedef struct {
    int32_t format, n, k;
    const void *data;
    const void *scale;
    const void *minimum;
    const float *bias;
} DfMatrix;

typedef struct {
    const float *gain;  // null: there is no such norm
    const float *bias;  // layernorm only
} DfGain;

typedef struct {
    DfGain attention_norm, mlp_norm;                // of what attention and MLP read
    DfGain attention_output_norm, mlp_output_norm;  // of what they give
    DfGain q_norm, k_norm;
    DfMatrix q, k, v, o, gate, up, down;  // gate without data: the MLP is not gated
    int32_t window;                       // keys that a query sees, its own included; 0: all
} DfLayer;

// What a flow owns of one matrix: one in its place, or the low-rank addition b a x to it, in floats;
// neither has data: the flow shares it.
typedef struct {
    DfMatrix whole, a, b;
} DfOwn;

// What one flow owns in one layer; null: shares, or is not coupled.
typedef struct {
    const float *query, *intermediate, *output;
    DfGain attention_norm, mlp_norm, attention_output_norm, mlp_output_norm, q_norm;
    DfOwn q, o, gate, up, down;
} DfAuxLayer;

typedef struct {
    int32_t vocab, width, heads, kv_heads, head_dim, inner, layers, flows, positions;
    int32_t mlp, norm, readout;
    int32_t qk_row;  // q_norm and k_norm go over the row of all heads
    float norm_eps, embed_scale, attention_scale;
    float attention_softcap, final_softcap;  // 0: there is none
    int32_t page_size, pages, kv_format;  // kv_format: DF_F32, DF_BF16 or DF_INT8
    int32_t threads;
    DfGain final_norm;
    DfMatrix embed, head;
    const void *embed_positions;  // float [positions, D] or null
    const float *cosines, *sines;  // [positions, H / 2] or null
    const float *local_cosines, *local_sines;  // of layers with a window, where they differ; or null
    const DfLayer *layer;          // [layers]
    const DfAuxLayer *aux_layer;   // [flows, layers]
    const DfMatrix *aux_embed;     // [flows]
    const DfGain *aux_final_norm;  // [flows]
    const DfOwn *aux_head;         // [flows]
    const float *alpha_weight;     // [3] for DF_LEARNED, or null
} DfModelSpec;

// One step. Rows are sequence after sequence, those of the auxiliary too.
typedef struct {
    int32_t tokens, aux, sequences, reads, keep;
    const int32_t *token, *position, *slot;                // [T]; slot -1: do not write
    const int32_t *aux_token, *aux_position, *aux_pin;     // [A]; pin: a primary row, or with T = 0 a kept row
    const int32_t *row_end, *aux_end;                      // [B] running ends of each sequence's rows
    const int32_t *page, *page_begin;                      // pages of all sequences; [B + 1]
    const int32_t *read;                                   // [reads] primary rows, or with T = 0 unused
    const int32_t *aux_of_read;                            // [reads] the auxiliary row of a read row, -1: none
    float *log_p, *log_q, *log_r;                          // [reads, V], [A, V], [reads, V]
    float *alpha, *complement;                             // [reads]: alpha and 1 - alpha from p; with T = 0 given
    float *sureness;                                       // [reads]: logit of p's collision; with T = 0 given
    int32_t *best;                                         // [reads]
} DfStep;

typedef struct DfModel DfModel;

const char *df_isa(void);       // what this library was compiled for
const char *df_best_isa(void);  // what this machine can run
// A number made of the structs' sizes: whether the caller knows the same ones.
int32_t df_layout(void);
// null and *error set where the model cannot be built.
DfModel *df_model_new(const DfModelSpec *spec, const char **error);
void df_model_free(DfModel *);
int64_t df_model_weight_bytes(const DfModel *);
int64_t df_model_cache_bytes(const DfModel *);
void df_step(DfModel *, const DfStep *);
void df_copy_page(DfModel *, int32_t source, int32_t target);
// y [m, n] = x [m, k] times the matrix: for tests and measurements of the kernels alone.
void df_matmul(const DfMatrix *, const float *x, int32_t m, float *y, int32_t threads, int32_t repeats);

#ifdef __cplusplus
}
#endif
