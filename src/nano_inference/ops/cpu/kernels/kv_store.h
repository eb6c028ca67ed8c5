// Where keys and values lie in memory.
//
// For each unit and KV head there are block_size * head_dim keys of a layer, and as many values. If block_size is a
// multiple of 16, they are packed in groups of 16 tokens, so that products read them as they lie:
//   bf16: keys [group][head_dim / 2][16][2], values [group][8][head_dim][2]: pairs of dimensions, pairs of tokens
//   float: keys [group][head_dim][16], values [group][16][head_dim]
// Other block sizes hold plain rows [block_size][head_dim]. Where values are the keys, one KV head has these alone.
#pragma once
#include <cstdint>

#include "simd.h"

namespace nano {

template <class T>
struct KvLayer {
  T *keys, *values;
  int64_t head_stride, unit_stride;  // in numbers, between KV heads and between units
  const int64_t* units;              // block -> unit; null: a block is the unit of its number

  // Where a block's keys and values of one KV head begin.
  int64_t start(int64_t head, int64_t block) const {
    return head * head_stride + (units ? units[block] : block) * unit_stride;
  }
  bool keys_are_values() const { return keys == values; }
};

// A layer by its strides. Of keys that are the values there is one head, which every head is.
template <class T>
KvLayer<T> kv_layer(void* keys, void* values, int64_t head_stride, int64_t unit_stride, const int64_t* units) {
  return {static_cast<T*>(keys), static_cast<T*>(values), keys == values ? 0 : head_stride, unit_stride, units};
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

// Read them back.
template <class T>
void read_kv(const KvLayer<T>& layer, int64_t block_size, int64_t head_dim, int64_t head, int64_t slot, T* key,
             T* value);

// Put one row into a packed group of 16 tokens, as token `lane`.
template <class T>
inline void pack_key(T* group, int64_t head_dim, int64_t lane, const T* key) {
  for (int64_t d = 0; d < head_dim; d += DEPTH<T>)
    memcpy(group + d * LANES + lane * DEPTH<T>, key + d, DEPTH<T> * sizeof(T));
}
template <class T>
inline void pack_value(T* group, int64_t head_dim, int64_t lane, const T* value) {
  T* to = group + lane / DEPTH<T> * DEPTH<T> * head_dim + lane % DEPTH<T>;
  for (int64_t d = 0; d < head_dim; d++) to[d * DEPTH<T>] = value[d];
}

// A packed group of keys, as one of values.
template <class T>
void values_of_keys(const T* keys, int64_t head_dim, T* values);

}  // namespace nano
