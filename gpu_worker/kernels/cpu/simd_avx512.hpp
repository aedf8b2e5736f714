// Vectors of 16 floats or integers on AVX-512 with VNNI, and with BF16 where the translation unit is compiled for it.
// Included inside the namespace of one instruction set; simd_avx2.hpp and simd_portable.hpp offer the same names.

constexpr int kTileRows = 12;    // rows per pass over the weights: two accumulators each, in 32 registers
constexpr int kTilePairs = 6;    // (row, head) pairs per pass over keys or values
constexpr int kTileVectors = 4;  // of values, in such a pass
constexpr int kTileGroups = 2;   // of 16 keys, in such a pass
constexpr int kWideGroups = 4;   // the same where there are no more than half as many pairs
constexpr int kWideVectors = 4;

using F = __m512;
using I = __m512i;
using Acc4 = __m512i;

inline F fzero() { return _mm512_setzero_ps(); }
inline F fset(float x) { return _mm512_set1_ps(x); }
inline F fload(const float* p) { return _mm512_loadu_ps(p); }
inline void fstore(float* p, F x) { _mm512_storeu_ps(p, x); }
inline __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }
inline F fload_n(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline void fstore_n(float* p, F x, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }
inline F fadd(F a, F b) { return _mm512_add_ps(a, b); }
inline F fsub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F fmul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F fdiv(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F fmax(F a, F b) { return _mm512_max_ps(a, b); }
inline F fmin(F a, F b) { return _mm512_min_ps(a, b); }
inline F fabs(F a) { return _mm512_abs_ps(a); }
inline F fround(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// Lanes n and up become `fill`.
inline F fkeep_n(F x, int64_t n, float fill) { return _mm512_mask_mov_ps(fset(fill), first_lanes(n), x); }
// x * 2^n for integral n; zero where that is below the smallest float.
inline F fscale2(F x, F n) { return _mm512_scalef_ps(x, n); }

inline I iload(const void* p) { return _mm512_loadu_si512(p); }
inline I iset(int32_t x) { return _mm512_set1_epi32(x); }
inline I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
inline F to_float(I x) { return _mm512_cvtepi32_ps(x); }
inline I to_int(F x) { return _mm512_cvtps_epi32(x); }
inline int32_t isum(I x) { return _mm512_reduce_add_epi32(x); }
inline void istore8(int8_t* p, I x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x)); }
inline I low_nibbles(I x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline I high_nibbles(I x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
inline F fload_f16(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

inline I spread4(const int8_t* x) {
  int32_t word;
  __builtin_memcpy(&word, x, 4);
  return _mm512_set1_epi32(word);
}
// Nibble weights times 4 activations per lane.
inline Acc4 zero4() { return _mm512_setzero_si512(); }
inline Acc4 dot4(Acc4 acc, I weights, const int8_t* x) { return _mm512_dpbusd_epi32(acc, weights, spread4(x)); }
inline I finish4(Acc4 acc) { return acc; }
// Weights stored as int8 + 128; `offset` is -128 times the sum of the activations.
inline I start8(int32_t offset) { return _mm512_set1_epi32(offset); }
inline I dot8(I acc, I weights, const int8_t* x) { return _mm512_dpbusd_epi32(acc, weights, spread4(x)); }

inline void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }
// For writing: another core's copy of the line is taken away while there is something else to do.
inline void prefetch_write(const void* p) { __builtin_prefetch(p, 1); }
// Into the second-level cache: more of these can be under way at a time.
inline void prefetch_far(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

#ifdef __AVX512BF16__
using Pair = uint32_t;  // two bfloat16
inline F dot_pair(F acc, I pairs, const Pair* x) {
  return _mm512_dpbf16_ps(acc, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(*x)));
}
inline F store_pairs(Pair* p, F x) {
  const __m256i halves = (__m256i)_mm512_cvtneps_pbh(x);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), halves);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
#else
struct Pair {
  float even, odd;
};
inline F dot_pair(F acc, I pairs, const Pair* x) {
  const F even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  const F odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u))));
  return fma(odd, fset(x->odd), fma(even, fset(x->even), acc));
}
// 16 floats as 8 pairs; returns the values as stored.
inline F store_pairs(Pair* p, F x) {
  _mm512_storeu_ps(p, x);
  return x;
}
#endif
inline I drop_odd(I pairs) { return _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff)); }

// Reductions over lanes, always in this order.
inline float fsum(F x) {
  const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
inline float flargest(F x) {
  const __m256 a = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}
