// Which instruction sets were compiled in and run on this processor.
#include "isa.hpp"

namespace dl {

namespace portable {
extern const Kernels kernels;
}
#ifdef DL_HAVE_X86
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
#endif
#ifdef DL_HAVE_AVX512BF16
namespace avx512bf16 {
extern const Kernels kernels;
}
#endif

const Kernels* kernels_for(int32_t isa) {
  if (isa == DL_PORTABLE) return &portable::kernels;
#ifdef DL_HAVE_X86
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (isa == DL_AVX2) return avx2 ? &avx2::kernels : nullptr;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  if (isa == DL_AVX512_VNNI) return avx512 ? &avx512::kernels : nullptr;
#ifdef DL_HAVE_AVX512BF16
  if (isa == DL_AVX512_BF16) return avx512 && __builtin_cpu_supports("avx512bf16") ? &avx512bf16::kernels : nullptr;
#endif
#endif
  return nullptr;
}

int32_t best_isa() {
  for (int32_t isa = DL_AVX512_BF16; isa > DL_PORTABLE; isa--) {
    if (kernels_for(isa) != nullptr) return isa;
  }
  return DL_PORTABLE;
}

}  // namespace dl
