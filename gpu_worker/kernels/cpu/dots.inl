// Integer dot products of M rows with a block's 16 columns: 32 inputs as nibbles, or 4 * N inputs as bytes from `sum` on.
// Row r's activations begin at q[r] + at.
template <int M>
inline void nibble_dots(const uint8_t* w, const int8_t* const* q, int64_t at, I* sum) {
  Acc4 acc[M];
  for (int r = 0; r < M; r++) acc[r] = zero4();
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const I v = iload(w + i * 64);
    const I low = low_nibbles(v), high = high_nibbles(v);
    for (int r = 0; r < M; r++) {
      const int8_t* x = q[r] + at + 4 * i;
      acc[r] = dot4(dot4(acc[r], low, x), high, x + 16);
    }
  }
  for (int r = 0; r < M; r++) sum[r] = finish4(acc[r]);
}
template <int M, int N>
inline void byte_dots(const uint8_t* w, const int8_t* const* q, int64_t at, I* sum) {
#pragma GCC unroll 16
  for (int i = 0; i < N; i++) {
    const I v = iload(w + i * 64);
    for (int r = 0; r < M; r++) sum[r] = dot8(sum[r], v, q[r] + at + 4 * i);
  }
}
