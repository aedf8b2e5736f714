// The residual blocks of Medusa's heads.
#pragma once
#include "formats.hpp"
#include "isa.hpp"
#include "team.hpp"

namespace dl {

// y[rows, n / k, k] = x + silu(x times the weights, plus bias): n / k blocks over the same rows x[rows, k].
void run_residual_blocks(const DlLinear& linear, Team& team, const Kernels& kernels, int32_t group, const float* x,
                         int64_t rows, float* y);

}  // namespace dl
