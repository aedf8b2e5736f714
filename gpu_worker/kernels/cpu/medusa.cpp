#include "medusa.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "error.hpp"
#include "head.hpp"
#include "residual_block.hpp"

namespace dl {

void run_medusa(const DlLinear& blocks, const DlLinear& lm_head, Team& team, const Kernels& kernels, int32_t group,
                const float* x, int64_t rows, int32_t heads, int32_t count, const int64_t* target_ids, int64_t* ids,
                float* log_probabilities) {
  const int64_t h = blocks.k, there = blocks.n / h;
  require(heads >= 1 && heads <= there,
          "heads: " + std::to_string(heads) + ", must be between 1 and " + std::to_string(there));
  require(lm_head.k == h,
          "lm_head: " + std::to_string(lm_head.k) + " inputs, the blocks give " + std::to_string(h));
  std::vector<float> states(static_cast<size_t>(rows * blocks.n));
  run_residual_blocks(blocks, team, kernels, group, x, rows, states.data());
  if (heads < there) {  // the first heads' states of each row, one row behind the other
    for (int64_t row = 1; row < rows; row++) {
      std::copy_n(states.data() + row * blocks.n, heads * h, states.data() + row * heads * h);
    }
  }
  const int64_t drawn = rows * heads;
  std::vector<float> lse(static_cast<size_t>(drawn));
  run_topk(lm_head, team, kernels, group, states.data(), drawn, count, ids, log_probabilities, lse.data());
  for (int64_t i = 0; i < drawn * count; i++) {
    log_probabilities[i] -= lse[static_cast<size_t>(i / count)];
    if (target_ids != nullptr) ids[i] = target_ids[ids[i]];
  }
}

}  // namespace dl
