// The vectors of simd_avx512.hpp in the vector extension of GCC and Clang: any processor, no intrinsics.

constexpr int kTileRows = 2;
constexpr int kTilePairs = 1;
constexpr int kTileVectors = 2;
constexpr int kTileGroups = 2;
constexpr int kWideGroups = 1;
constexpr int kWideVectors = 2;

typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
using Acc4 = I;

inline F fset(float x) { return F{} + x; }
inline F fzero() { return F{}; }
inline F fload(const float* p) {
  F x;
  __builtin_memcpy(&x, p, 64);
  return x;
}
inline void fstore(float* p, F x) { __builtin_memcpy(p, &x, 64); }
inline F fload_n(const float* p, int64_t n) {
  F x{};
  __builtin_memcpy(&x, p, static_cast<size_t>(n) * 4);
  return x;
}
inline void fstore_n(float* p, F x, int64_t n) { __builtin_memcpy(p, &x, static_cast<size_t>(n) * 4); }
inline F fadd(F a, F b) { return a + b; }
inline F fsub(F a, F b) { return a - b; }
inline F fmul(F a, F b) { return a * b; }
inline F fdiv(F a, F b) { return a / b; }
inline F fma(F a, F b, F c) { return a * b + c; }
inline F select(I mask, F a, F b) { return (F)((mask & (I)a) | (~mask & (I)b)); }
inline F fmax(F a, F b) { return select(a > b, a, b); }
inline F fmin(F a, F b) { return select(a < b, a, b); }
inline F fabs(F a) { return (F)((I)a & 0x7fffffff); }
// Nearest integer, ties to even: 1.5 * 2^23 leaves no room for a fraction (|a| < 2^22).
inline F fround(F a) { return (a + 12582912.0f) - 12582912.0f; }
inline I lane_numbers() { return I{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
inline F fkeep_n(F x, int64_t n, float fill) { return select(lane_numbers() < static_cast<int32_t>(n), x, fset(fill)); }
inline I to_int(F x) { return __builtin_convertvector(fround(x), I); }
inline F to_float(I x) { return __builtin_convertvector(x, F); }
// x * 2^n for integral n of at least -127; 2^-127 counts as zero.
inline F fscale2(F x, F n) { return x * (F)((to_int(n) + 127) << 23); }

inline I iload(const void* p) {
  I x;
  __builtin_memcpy(&x, p, 64);
  return x;
}
inline I iset(int32_t x) { return I{} + x; }
inline I iadd(I a, I b) { return a + b; }
inline int32_t isum(I x) {
  int32_t sum = 0;
  for (int i = 0; i < 16; i++) sum += x[i];
  return sum;
}
inline void istore8(int8_t* p, I x) {
  for (int i = 0; i < 16; i++) p[i] = static_cast<int8_t>(x[i]);
}
inline I low_nibbles(I x) { return x & 0x0f0f0f0f; }
inline I high_nibbles(I x) { return (x >> 4) & 0x0f0f0f0f; }
inline F fload_f16(const uint8_t* p) {
  uint16_t halves[16];
  __builtin_memcpy(halves, p, 32);
  I bits;
  for (int i = 0; i < 16; i++) bits[i] = halves[i];
  const F magnitude = (F)((bits & 0x7fff) << 13) * 0x1p112f;  // infinities and NaN do not occur in scales
  return (F)((I)magnitude | ((bits & 0x8000) << 16));
}

// Byte j of every lane, as stored (unsigned).
inline I byte_of(I x, int j) { return (x >> (8 * j)) & 255; }
inline I start8(int32_t offset) { return iset(offset); }
inline I dot8(I acc, I weights, const int8_t* x) {
  for (int j = 0; j < 4; j++) acc += byte_of(weights, j) * static_cast<int32_t>(x[j]);
  return acc;
}
inline Acc4 zero4() { return I{}; }
inline Acc4 dot4(Acc4 acc, I weights, const int8_t* x) { return dot8(acc, weights, x); }
inline I finish4(Acc4 acc) { return acc; }

inline void prefetch(const uint8_t* p) { __builtin_prefetch(p); }
inline void prefetch_write(const void* p) { __builtin_prefetch(p, 1); }
inline void prefetch_far(const uint8_t* p) { __builtin_prefetch(p, 0, 2); }

struct Pair {
  float even, odd;
};
inline F dot_pair(F acc, I pairs, const Pair* x) {
  const F even = (F)(pairs << 16), odd = (F)(pairs & static_cast<int32_t>(0xffff0000u));
  return fma(odd, fset(x->odd), fma(even, fset(x->even), acc));
}
inline F store_pairs(Pair* p, F x) {
  __builtin_memcpy(p, &x, 64);
  return x;
}
inline I drop_odd(I pairs) { return pairs & 0xffff; }

inline float fsum(F x) {
  float a[8], b[4];
  for (int i = 0; i < 8; i++) a[i] = x[i] + x[i + 8];
  for (int i = 0; i < 4; i++) b[i] = a[i] + a[i + 4];
  return (b[0] + b[2]) + (b[1] + b[3]);
}
inline float flargest(F x) {
  float result = x[0];
  for (int i = 1; i < 16; i++) result = x[i] > result ? x[i] : result;
  return result;
}
