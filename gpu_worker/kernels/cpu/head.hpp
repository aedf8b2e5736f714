// The output head: hidden rows to logits, to the best id, or to the best few with the log-sum-exp.
#pragma once
#include "formats.hpp"
#include "isa.hpp"
#include "team.hpp"

namespace dl {

// y[rows, n] = x[rows, k] times the weights, plus bias.
void run_linear(const DlLinear& linear, Team& team, const Kernels& kernels, int32_t group, const float* x,
                int64_t rows, float* y);

// See dl_linear_topk; lse may be null. Never holds more than a strip of logits per thread.
void run_topk(const DlLinear& head, Team& team, const Kernels& kernels, int32_t group, const float* hidden,
              int64_t rows, int32_t k, int64_t* ids, float* logits, float* lse);

}  // namespace dl
