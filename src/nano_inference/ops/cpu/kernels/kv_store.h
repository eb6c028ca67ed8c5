// Where keys and values lie in memory.
//
// For each unit and KV head there are block_size * head_dim keys of a layer, and as many values. If block_size is a
// multiple of 16, they are packed in groups of 16 tokens, so that products read them as they lie:
//   bf16: keys [group][head_dim / 2][16][2], values [group][8][head_dim][2]: pairs of dimensions, pairs of tokens
//   float: keys [group][head_dim][16], values [group][16][head_dim]
// Other block sizes hold plain rows [block_size][head_dim]. Where values are the keys, one KV head has these alone.
//
// They may be codes of 8 bits instead (ops/kv_codes.py), each row with a float, its scale: packed codes have the order of
// the numbers that they stand for, and scales [block_size] lie behind those of a unit and head; else each behind its row.
#pragma once
#include <cstdint>
#include <type_traits>

#include "simd.h"

namespace nano {

constexpr int64_t MAX_HEAD_DIM = 576;

// S: of what is stored: bf16 or float, as products read them, or int8_t, which are codes.
template <class S>
struct KvLayer {
  S *keys, *values;
  int64_t head_stride, unit_stride;  // in numbers, between KV heads and between units
  const int64_t* units;              // block -> unit; null: a block is the unit of its number

  // Where a block's keys and values of one KV head begin.
  int64_t start(int64_t head, int64_t block) const {
    return head * head_stride + (units ? units[block] : block) * unit_stride;
  }
  bool keys_are_values() const { return keys == values; }
};

// Numbers that a row takes.
template <class S>
constexpr int64_t row_size(int64_t head_dim) {
  return head_dim + (std::is_same_v<S, int8_t> ? int64_t(sizeof(float)) : 0);
}

// A layer by its strides. Of keys that are the values there is one head, which every head is.
template <class S>
KvLayer<S> kv_layer(void* keys, void* values, int64_t head_stride, int64_t unit_stride, const int64_t* units) {
  return {static_cast<S*>(keys), static_cast<S*>(values), keys == values ? 0 : head_stride, unit_stride, units};
}

inline bool is_packed(int64_t block_size) { return block_size % LANES == 0; }

// Numbers of a row that stand beside each other in a packed group.
template <class T>
constexpr int DEPTH = sizeof(T) == 2 ? 2 : 1;

// Write the key and the value [head_dim] of one row and one KV head to a slot, block * block_size + offset. Rows with
// different slots may be written by different threads.
template <class T>
void store_kv(const KvLayer<T>& layer, int64_t block_size, int64_t head_dim, int64_t head, int64_t slot, const T* key,
              const T* value);
// The same, rounded to codes.
template <class T>
void store_kv(const KvLayer<int8_t>& layer, int64_t block_size, int64_t head_dim, int64_t head, int64_t slot,
              const T* key, const T* value);

// Read them back: what is attended. `T` is what products read, also where there are codes.
template <class T, class S>
void read_kv(const KvLayer<S>& layer, int64_t block_size, int64_t head_dim, int64_t head, int64_t slot, float* key,
             float* value);

// Codes as numbers, exactly: bf16 has digits enough.
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

// Where the scale of the row at `offset` of a unit lies, whose codes begin at `codes`.
inline int8_t* scale_at(int8_t* codes, int64_t block_size, int64_t head_dim, int64_t offset) {
  return codes + (is_packed(block_size) ? block_size * head_dim + offset * int64_t(sizeof(float))
                                        : offset * row_size<int8_t>(head_dim) + head_dim);
}

// Put one row into a packed group of 16 tokens, as token `lane`, in the order of T.
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

// A packed group of keys, as one of values.
template <class T>
void values_of_keys(const T* keys, int64_t head_dim, T* values);

}  // namespace nano
