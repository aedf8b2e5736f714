// The kernels compiled for AVX-512 with VNNI. build.py sets the flags; nothing of the standard library that is not
// inlined may be used here, or the linker could hand this instruction set's copy to the others.
#include <immintrin.h>

#include "isa.hpp"

namespace dl::avx512 {
namespace {
#include "simd_avx512.hpp"
#include "rows.inl"
#include "dots.inl"
#include "linear.inl"
#include "attention.inl"
}  // namespace

extern const Kernels kernels;
const Kernels kernels = {
    "avx512", sizeof(Pair), kTileRows, linear, will_read, will_write, rms_norm, quantise, silu_mul, rotate_query, rotate_key, attention_block,
    attention_merge, attention_finish, largest, exp_sum, merge_exp_sum};

}  // namespace dl::avx512
