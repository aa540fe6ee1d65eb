// From final rows to log p, log q and log r, as ops/mixture.py defines them.
#pragma once
#include "phases.h"

namespace {
enum Reduction { TOP_P, SUM_P, SQUARE, MIXED, BEST_R, BEST_ID, REDUCTIONS = 8 };

// The logit of a distribution's collision probability, from the sums of p² and of p (1 - p).
inline float sureness(float square, float mixed) {
    constexpr float tiny = 1.17549435e-38f;
    return logf(fmaxf(square, tiny)) - logf(fmaxf(mixed, tiny));
}
inline float log_logistic(float x) { return fminf(x, 0) - log1pf(expf(-fabsf(x))); }

// Rows of the head: the read primary rows, then the auxiliary rows flow by flow. With T = 0 log p and alpha
// are given: the primary's rows were read by an earlier step.
inline void NativeModel::read_out(Frame &f, int t) {
    int reads = f.T ? f.reads : 0, rows = reads + f.flows * f.A, V = spec.vocab, threads = pool->size();
    if (rows == 0) return;
    bool bf16 = reads_bf16(head.format);
    float buffer[width_ld + 16];
    memset(buffer, 0, sizeof(float) * (width_ld + 16));
    for (int i = t; i < rows; i += threads) {
        int row = i < reads ? f.s.read[i] : f.T + (i - reads), flow = f.flow(row);
        const DfGain &gain = flow >= 0 && aux_final_norm[flow].gain ? aux_final_norm[flow] : spec.final_norm;
        normalise(spec.norm, gain, spec.norm_eps, rooms.h.data() + (size_t)row * D, D, buffer);
        for (int c = 0; c < width_ld; c += 16)
            put(rooms.hidden_f.data(), rooms.hidden_b.data(), bf16, (size_t)i * width_ld + c, load<f16x>(buffer + c));
    }
    pool->barrier();
    int begin, end;
    share_of(head.strips, BLOCK / STRIP, t, threads, begin, end);
    auto target = [&](int row) {
        if (row < reads) return f.s.log_p + (size_t)row * V;
        int a = row - reads;  // the first flow's logits go to log q, the others' to a room of their own
        return a < f.A ? f.s.log_q + (size_t)a * V : rooms.flows.data() + (size_t)(a - f.A) * V;
    };
    auto emit = [&](int row, int strip, const f16x *v) {
        int column = strip * STRIP;
        f16x logits = *v;
        if (spec.final_softcap > 0) logits = hyperbolic_tangent(logits / spec.final_softcap) * spec.final_softcap;
        memcpy(target(row) + column, &logits, sizeof(float) * std::min(STRIP, V - column));
    };
    Operand x{bf16 ? nullptr : rooms.hidden_f.data(), bf16 ? rooms.hidden_b.data() : nullptr, width_ld};
    auto own = [&](int flow) -> const OwnWeights & { return flow_heads[flow]; };
    project({reads, f.A, f.flows}, x, head, own, begin, end, false, t, emit);
    distributions(f, t, begin * STRIP, std::min(end * STRIP, V), target);
}

// Every thread reduces over the blocks it wrote; between barriers all learn the whole sums.
template <class Target>
inline void NativeModel::distributions(Frame &f, int t, int begin, int end, Target target) {
    int reads = f.T ? f.reads : 0, rows = reads + f.flows * f.A, threads = pool->size(), blocks = ceil_div(spec.vocab, BLOCK);
    bool learned = spec.readout == DF_LEARNED, mixes = spec.flows && (learned || spec.readout == DF_MIXTURE);
    float *room = rooms.reduce.data();
    auto cell = [&](int row, int block) { return room + ((size_t)row * blocks + block) * REDUCTIONS; };
    auto each_block = [&](auto step) {
        for (int c = begin; c < end; c += BLOCK) step(c / BLOCK, c, std::min(c + BLOCK, end));
    };
    auto each = [](int from, int to, auto step) {  // 16 at a time, then what is left, in a padded vector
        int c = from;
        for (; c + 16 <= to; c += 16) step(c, std::integral_constant<int, 16>{});
        if (c < to) step(c, to - c);
    };
    auto take = [](const float *x, auto count, float fill) {
        if constexpr (!std::is_same_v<decltype(count), int>) return load<f16x>(x);
        f16x v = all(fill);
        for (int i = 0; i < count; i++) v.set(i, x[i]);
        return v;
    };
    auto give = [](float *x, auto count, f16x v) { memcpy(x, &v, sizeof(float) * count); };

    for (int row = 0; row < rows; row++) {
        const float *x = target(row);
        each_block([&](int block, int from, int to) {
            f16x top = all(-INFINITY), sums = zeros();
            each(from, to, [&](int c, auto n) {
                top = bigger(take(x + c, n, -INFINITY), top);
                sums += take(x + c, n, 0) * 0.0f;  // comparisons drop what is not a number; this does not
            });
            float best = largest(top);
            each(from, to, [&](int c, auto n) { sums += exponential(take(x + c, n, -INFINITY) - best); });
            cell(row, block)[TOP_P] = best, cell(row, block)[SUM_P] = sum(sums);
        });
    }
    pool->barrier();
    for (int row = 0; row < rows; row++) {
        float best = -INFINITY, total = 0, *x = target(row);
        for (int k = 0; k < blocks; k++) best = fmaxf(best, cell(row, k)[TOP_P]);
        for (int k = 0; k < blocks; k++)
            if (cell(row, k)[SUM_P] != 0) total += cell(row, k)[SUM_P] * expf(cell(row, k)[TOP_P] - best);
        float normaliser = best + logf(total);
        each_block([&](int block, int from, int to) {
            f16x square = zeros(), mixed = zeros();
            each(from, to, [&](int c, auto n) {
                f16x lp = take(x + c, n, -INFINITY) - normaliser;
                give(x + c, n, lp);
                if (row >= reads || !mixes) return;
                f16x p = exponential(lp);
                square += p * p, mixed += p * (1.0f - p);
            });
            if (row < reads) cell(row, block)[SQUARE] = sum(square), cell(row, block)[MIXED] = sum(mixed);
        });
    }
    if (f.flows > 1)  // q is the flows' mean in probability
        for (int a = 0; a < f.A; a++)
            each(begin, end, [&](int c, auto n) {
                f16x mean = zeros();
                for (int flow = 0; flow < f.flows; flow++) mean += exponential(take(target(reads + flow * f.A + a) + c, n, -INFINITY));
                f16x lq;
                for (int i = 0; i < n; i++) lq.set(i, logf(mean[i] / f.flows));
                give(f.s.log_q + (size_t)a * spec.vocab + c, n, lq);
            });
    for (int a = 0; learned && f.flows && a < f.A; a++)
        each_block([&](int block, int from, int to) {
            f16x square = zeros(), mixed = zeros();
            each(from, to, [&](int c, auto n) {
                f16x q = exponential(take(target(reads + a) + c, n, -INFINITY));
                square += q * q, mixed += q * (1.0f - q);
            });
            cell(reads + a, block)[SQUARE] = sum(square), cell(reads + a, block)[MIXED] = sum(mixed);
        });
    pool->barrier();
    for (int i = 0; i < f.s.reads; i++) mix_row(f, t, i, each_block, cell, each, take, give);
    pool->barrier();
    for (int i = t; i < f.s.reads; i += threads) {
        if (f.T == 0 && f.s.aux_of_read[i] < 0) continue;
        float best = -INFINITY;
        for (int k = 0; k < blocks; k++)
            if (cell(i, k)[BEST_R] > best) {
                best = cell(i, k)[BEST_R];
                memcpy(f.s.best + i, &cell(i, k)[BEST_ID], 4);
            }
        if (best == -INFINITY) f.s.best[i] = -1;
    }
}

// log r of one read row over a thread's columns, and the best of them.
template <class EachBlock, class Cell, class Each, class Take, class Give>
inline void NativeModel::mix_row(Frame &f, int t, int i, EachBlock each_block, Cell cell, Each each, Take take, Give give) {
    int V = spec.vocab, aux = f.flows ? f.s.aux_of_read[i] : -1;
    const float *log_p = f.s.log_p + (size_t)i * V, *log_q = aux < 0 ? nullptr : f.s.log_q + (size_t)aux * V;
    float *log_r = f.s.log_r + (size_t)i * V;
    float square = 0, mixed = 0;
    auto collect = [&](int row) {  // sums of p² and p (1 - p)
        square = mixed = 0;
        for (int k = 0; k < ceil_div(V, BLOCK); k++) square += cell(row, k)[SQUARE], mixed += cell(row, k)[MIXED];
        float total = square + mixed;  // float p add up to 1 within some 1e-5; the parts of a mixture must, exactly
        square /= total, mixed /= total;
    };
    if (f.T) {
        collect(i);
        if (t == 0) f.s.alpha[i] = square == square ? fminf(fmaxf(square, 0.5f), 1.0f) : NAN, f.s.complement[i] = fminf(fmaxf(mixed, 1.17549435e-38f), 0.5f);
    }
    float alpha = f.T ? fminf(fmaxf(square, 0.5f), 1.0f) : f.s.alpha[i];
    float rest = f.T ? fminf(fmaxf(mixed, 1.17549435e-38f), 0.5f) : f.s.complement[i];
    float log_alpha = logf(alpha), log_rest = logf(rest);
    if (spec.readout == DF_LEARNED) {
        float p = f.T ? sureness(square, mixed) : f.s.sureness[i];
        if (f.T && t == 0) f.s.sureness[i] = p;
        if (log_q) collect((f.T ? f.reads : 0) + aux);
        float logit = alpha_weight[0] + alpha_weight[1] * p + alpha_weight[2] * sureness(square, mixed);
        log_alpha = log_logistic(logit), log_rest = log_logistic(-logit);
    }
    bool mixture = (spec.readout == DF_MIXTURE || spec.readout == DF_LEARNED) && log_q, from_q = spec.readout == DF_AUX_ONLY && log_q;
    if (f.T == 0 && aux < 0) return;
    each_block([&](int block, int from, int to) {
        float best = -INFINITY;
        int32_t id = 0;
        each(from, to, [&](int c, auto n) {
            f16x r;
            if (mixture) {
                f16x a = take(log_p + c, n, -INFINITY) + log_alpha, b = take(log_q + c, n, -INFINITY) + log_rest;
                f16x high = bigger(a, b), low = where_above(a, b, b, a);
                r = high + log_one_plus(exponential(low - high));
            } else {
                r = take((from_q ? log_q : log_p) + c, n, -INFINITY);
            }
            if (log_r != log_p) give(log_r + c, n, r);
            float top = largest(r);
            if (!(top > best)) return;
            best = top;
            for (int k = n - 1; k >= 0; k--)
                if (r[k] == top) id = c + k;
        });
        cell(i, block)[BEST_R] = best;
        memcpy(&cell(i, block)[BEST_ID], &id, 4);
    });
}

}  // namespace
