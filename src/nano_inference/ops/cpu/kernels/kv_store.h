// Memory layout of keys and values.
//
// For each unit and KV head, a layer has block_size * head_dim keys and as many values. If block_size is a multiple of
// 16, they are packed in groups of 16 tokens, which products read without copying:
//   bf16: keys [group][head_dim / 2][16][2], values [group][8][head_dim][2]: pairs of dimensions, pairs of tokens
//   float: keys [group][head_dim][16], values [group][16][head_dim]
// Other block sizes store plain rows [block_size][head_dim]. If values are the keys, only the keys of one KV head are
// stored.
//
// Keys and values may be codes of 8 bits instead (ops/kv_codes.py), each row with a float scale. Packed codes have the
// order of the numbers that they represent, and the scales [block_size] follow the codes of a unit and head. In plain
// rows, each scale follows its row.
#pragma once
#include <cstdint>
#include <type_traits>

#include "simd.h"

namespace nano {

constexpr int64_t MAX_HEAD_DIM = 576;

// S: the stored type, bf16 or float as products read them, or int8_t for codes.
template <class S>
struct KvLayer {
  S *keys, *values;
  int64_t head_stride, unit_stride;  // in numbers, between KV heads and between units
  const int64_t* units;              // block -> unit; null: block ids are unit ids

  // Offset of a block's keys and values of one KV head.
  int64_t start(int64_t head, int64_t block) const {
    return head * head_stride + (units ? units[block] : block) * unit_stride;
  }
  bool keys_are_values() const { return keys == values; }
};

// Numbers per row.
template <class S>
constexpr int64_t row_size(int64_t head_dim) {
  return head_dim + (std::is_same_v<S, int8_t> ? int64_t(sizeof(float)) : 0);
}

// Return a layer with these strides. If keys are the values there is one head, which all KV heads share.
template <class S>
KvLayer<S> kv_layer(void* keys, void* values, int64_t head_stride, int64_t unit_stride, const int64_t* units) {
  return {static_cast<S*>(keys), static_cast<S*>(values), keys == values ? 0 : head_stride, unit_stride, units};
}

inline bool is_packed(int64_t block_size) { return block_size % LANES == 0; }

// Number of adjacent numbers of a row in a packed group.
template <class T>
constexpr int DEPTH = sizeof(T) == 2 ? 2 : 1;

// Write the key and the value [head_dim] of one row and one KV head to a slot, block * block_size + offset. Several
// threads may write rows with different slots.
template <class T>
void store_kv(const KvLayer<T>& layer, int64_t block_size, int64_t head_dim, int64_t head, int64_t slot, const T* key,
              const T* value);
// Write a key and a value, rounded to codes.
template <class T>
void store_kv(const KvLayer<int8_t>& layer, int64_t block_size, int64_t head_dim, int64_t head, int64_t slot,
              const T* key, const T* value);

// Read a key and a value, as attention does. `T` is the type that products read, also for codes.
template <class T, class S>
void read_kv(const KvLayer<S>& layer, int64_t block_size, int64_t head_dim, int64_t head, int64_t slot, float* key,
             float* value);

// Convert codes to numbers. This is exact: bf16 has enough digits.
inline void widen_codes(const int8_t* codes, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i++) out[i] = float(codes[i]);
}
inline void widen_codes(const int8_t* codes, int64_t count, bf16* out) {
  for (int64_t i = 0; i < count; i++) {
    const float number = float(codes[i]);
    uint32_t bits;
    memcpy(&bits, &number, 4);
    out[i] = bf16(bits >> 16);
  }
}

// Address of the scale of the row at `offset` of a unit whose codes begin at `codes`.
inline int8_t* scale_at(int8_t* codes, int64_t block_size, int64_t head_dim, int64_t offset) {
  return codes + (is_packed(block_size) ? block_size * head_dim + offset * int64_t(sizeof(float))
                                        : offset * row_size<int8_t>(head_dim) + head_dim);
}

// Write one row into a packed group of 16 tokens, as token `lane`, in the order of T.
template <class T, class S>
inline void pack_key(S* group, int64_t head_dim, int64_t lane, const S* key) {
  for (int64_t d = 0; d < head_dim; d += DEPTH<T>)
    memcpy(group + d * LANES + lane * DEPTH<T>, key + d, DEPTH<T> * sizeof(S));
}
template <class T, class S>
inline void pack_value(S* group, int64_t head_dim, int64_t lane, const S* value) {
  S* to = group + lane / DEPTH<T> * DEPTH<T> * head_dim + lane % DEPTH<T>;
  for (int64_t d = 0; d < head_dim; d++) to[d * DEPTH<T>] = value[d];
}

// Convert a packed group of keys to a packed group of values.
template <class T>
void values_of_keys(const T* keys, int64_t head_dim, T* values);

}  // namespace nano
