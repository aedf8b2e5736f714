// The vectors of simd_avx512.hpp as two halves of AVX2.

// 6 rows x 2 halves of the columns are 12 sums in 16 registers. A pass over keys has 4 x 1 or 2 x 2 accumulators.
constexpr int kTileRows = 6;
constexpr int kTilePairs = 4;
constexpr int kTileVectors = 1;
constexpr int kTileGroups = 1;
constexpr int kWideGroups = 2;
constexpr int kWideVectors = 2;

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};

inline F fset(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F fzero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F fload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void fstore(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline F fload_n(const float* p, int64_t n) {
  alignas(32) float buffer[16] = {};
  __builtin_memcpy(buffer, p, static_cast<size_t>(n) * 4);
  return fload(buffer);
}
inline void fstore_n(float* p, F x, int64_t n) {
  alignas(32) float buffer[16];
  fstore(buffer, x);
  __builtin_memcpy(p, buffer, static_cast<size_t>(n) * 4);
}
inline F fadd(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F fsub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F fmul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F fdiv(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F fmax(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F fmin(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F fabs(F x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline F fround(F x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline F lanes_below(int64_t n) {
  const __m256i count = _mm256_set1_epi32(static_cast<int32_t>(n));
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(count, lane)),
          _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, _mm256_add_epi32(lane, _mm256_set1_epi32(8))))};
}
inline F fkeep_n(F x, int64_t n, float fill) {
  const F mask = lanes_below(n), other = fset(fill);
  return {_mm256_blendv_ps(other.a, x.a, mask.a), _mm256_blendv_ps(other.b, x.b, mask.b)};
}
inline __m256 scale2(__m256 x, __m256 n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(exponent));
}
// x * 2^n for integral n of at least -127; 2^-127 counts as zero.
inline F fscale2(F x, F n) { return {scale2(x.a, n.a), scale2(x.b, n.b)}; }

inline I iload(const void* p) {
  const auto* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline I iset(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I iadd(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline int32_t isum(I x) {
  const __m256i a = _mm256_add_epi32(x.a, x.b);
  const __m128i b = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  const __m128i c = _mm_add_epi32(b, _mm_shuffle_epi32(b, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(c, _mm_shuffle_epi32(c, 0xb1)));
}
inline void istore8(int8_t* p, I x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
inline F fload_f16(const uint8_t* p) {
  const auto* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}

inline __m256i spread4(const int8_t* x) {
  int32_t word;
  __builtin_memcpy(&word, x, 4);
  return _mm256_set1_epi32(word);
}
// Both halves of the columns for a row at a time, so that its activations are spread once for both. A barrier after each
// row keeps the compiler from spreading those of all rows first, which would drive the sums out of the registers.
inline void keep_in_order(__m256i& x, __m256i& y) { asm volatile("" : "+x"(x), "+x"(y) : : "memory"); }

inline __m256i load_half(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

template <int M>
inline void nibble_dots(const uint8_t* w, const int8_t* const* q, int64_t at, I* sum) {
  const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  I acc[M];  // 16-bit sums: 8 products of nibble and int8 pairs stay below 2^15
#pragma GCC unroll 8
  for (int r = 0; r < M; r++) acc[r] = iset(0);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
#pragma GCC unroll 2
    for (int high = 0; high < 2; high++) {
      __m256i a = load_half(w + i * 64), b = load_half(w + i * 64 + 32);
      if (high == 1) {
        a = _mm256_srli_epi16(a, 4);
        b = _mm256_srli_epi16(b, 4);
      }
      a = _mm256_and_si256(a, mask);
      b = _mm256_and_si256(b, mask);
      keep_in_order(a, b);
#pragma GCC unroll 8
      for (int r = 0; r < M; r++) {
        const __m256i x = spread4(q[r] + at + 4 * i + 16 * high);
        acc[r].a = _mm256_add_epi16(acc[r].a, _mm256_maddubs_epi16(a, x));
        acc[r].b = _mm256_add_epi16(acc[r].b, _mm256_maddubs_epi16(b, x));
        keep_in_order(acc[r].a, acc[r].b);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < M; r++) sum[r] = {_mm256_madd_epi16(acc[r].a, ones), _mm256_madd_epi16(acc[r].b, ones)};
}
// maddubs saturates on 8-bit weights plus 128, so the weights' sign moves to the activations and no offset is left.
inline I start8(int32_t) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
// The halves of the columns one after the other: sums of both are too many registers with this many steps in between.
template <int M, int N>
inline void byte_dots_half(const uint8_t* w, const int8_t* const* q, int64_t at, __m256i* sum) {
  const __m256i ones = _mm256_set1_epi16(1), flip = _mm256_set1_epi8(-128);
  __m256i acc[M];
#pragma GCC unroll 8
  for (int r = 0; r < M; r++) acc[r] = sum[r];
#pragma GCC unroll 1
  for (int i = 0; i < N; i++) {
    const __m256i biased = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + i * 64));
    const __m256i weights = _mm256_xor_si256(biased, flip), size = _mm256_abs_epi8(weights);
#pragma GCC unroll 8
    for (int r = 0; r < M; r++) {
      const __m256i words = _mm256_maddubs_epi16(size, _mm256_sign_epi8(spread4(q[r] + at + 4 * i), weights));
      const __m256i dots = _mm256_madd_epi16(words, ones);
      acc[r] = _mm256_add_epi32(acc[r], dots);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < M; r++) sum[r] = acc[r];
}
template <int M, int N>
inline void byte_dots(const uint8_t* w, const int8_t* const* q, int64_t at, I* sum) {
  __m256i half[M];
#pragma GCC unroll 8
  for (int r = 0; r < M; r++) half[r] = sum[r].a;
  byte_dots_half<M, N>(w, q, at, half);
#pragma GCC unroll 8
  for (int r = 0; r < M; r++) sum[r].a = half[r];
#pragma GCC unroll 8
  for (int r = 0; r < M; r++) half[r] = sum[r].b;
  asm volatile("" ::: "memory");
  byte_dots_half<M, N>(w + 32, q, at, half);
#pragma GCC unroll 8
  for (int r = 0; r < M; r++) sum[r].b = half[r];
}

inline void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }
// For writing: another core's copy of the line is taken away while there is something else to do.
inline void prefetch_write(const void* p) { __builtin_prefetch(p, 1); }
// Into the second-level cache: more of these can be under way at a time.
inline void prefetch_far(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

struct Pair {
  float even, odd;
};
inline __m256 dot_pair_half(__m256 acc, __m256i pairs, __m256 even, __m256 odd) {
  const __m256 low = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  const __m256 high = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u))));
  return _mm256_fmadd_ps(high, odd, _mm256_fmadd_ps(low, even, acc));
}
inline F dot_pair(F acc, I pairs, const Pair* x) {
  const __m256 even = _mm256_set1_ps(x->even), odd = _mm256_set1_ps(x->odd);
  return {dot_pair_half(acc.a, pairs.a, even, odd), dot_pair_half(acc.b, pairs.b, even, odd)};
}
inline F store_pairs(Pair* p, F x) {
  fstore(&p->even, x);
  return x;
}
inline I drop_odd(I x) {
  const __m256i mask = _mm256_set1_epi32(0xffff);
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}

inline float fsum(F x) {
  const __m256 a = _mm256_add_ps(x.a, x.b);
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
inline float flargest(F x) {
  const __m256 a = _mm256_max_ps(x.a, x.b);
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}
