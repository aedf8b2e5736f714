// Draws from logits with counter-based noise: what gpu_worker/sampling/law.py does in torch, for the whole vocabulary.
#pragma once
#include <cstdint>

#include "team.hpp"

namespace dl {

constexpr int kMaxDraws = 64;

// For each of `rows` rows: the `count` columns of the largest weights[row, column] + Gumbel(keys[row], id of column),
// descending, ties by lower column, and those sums. ids[rows, n] may be null: column c is id c. Weights of -inf are
// never drawn; where fewer than `count` columns are left, the rest is column 0 with -inf.
void run_gumbel_topk(Team& team, const float* weights, const int64_t* ids, const int64_t* keys, int64_t rows, int64_t n,
                     int32_t count, int64_t* columns, float* values);

}  // namespace dl
