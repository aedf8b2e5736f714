// What Medusa's heads draft, from the target's hidden states to ids.
#pragma once
#include "formats.hpp"
#include "isa.hpp"
#include "team.hpp"

namespace dl {

// See dl_medusa_candidates.
void run_medusa(const DlLinear& blocks, const DlLinear& lm_head, Team& team, const Kernels& kernels, int32_t group,
                const float* x, int64_t rows, int32_t heads, int32_t count, const int64_t* target_ids, int64_t* ids,
                float* log_probabilities);

}  // namespace dl
