#include "kv_store.h"

#include "round_codes.h"
#include "transpose.h"

namespace nano {
namespace {

template <class T, class S>
void put(const KvLayer<S>& layer, int64_t block_size, int64_t head_dim, int64_t start, int64_t offset, const S* key,
         const S* value) {
  if (is_packed(block_size)) {
    int64_t group = start + offset / LANES * LANES * head_dim, lane = offset % LANES;
    pack_key<T>(layer.keys + group, head_dim, lane, key);
    if (!layer.keys_are_values()) pack_value<T>(layer.values + group, head_dim, lane, value);
  } else {
    int64_t row = start + offset * row_size<S>(head_dim);
    memcpy(layer.keys + row, key, head_dim * sizeof(S));
    if (!layer.keys_are_values()) memcpy(layer.values + row, value, head_dim * sizeof(S));
  }
}

template <class T, class S>
void get(const KvLayer<S>& layer, int64_t block_size, int64_t head_dim, int64_t start, int64_t offset, S* key, S* value) {
  constexpr int depth = DEPTH<T>;
  if (is_packed(block_size)) {
    int64_t group = start + offset / LANES * LANES * head_dim, lane = offset % LANES;
    const S* keys = layer.keys + group + lane * depth;
    const S* values = layer.values + group + lane / depth * depth * head_dim + lane % depth;
    for (int64_t d = 0; d < head_dim; d++) {
      key[d] = keys[d / depth * depth * LANES + d % depth];
      value[d] = layer.keys_are_values() ? key[d] : values[d * depth];
    }
  } else {
    int64_t row = start + offset * row_size<S>(head_dim);
    memcpy(key, layer.keys + row, head_dim * sizeof(S));
    memcpy(value, layer.values + row, head_dim * sizeof(S));
  }
}

inline float as_float(float x) { return x; }
inline float as_float(bf16 x) { return widen1(x); }

// Round a row to codes, and store its scale at `scale`.
template <class T>
void encode_row(const T* row, int64_t head_dim, int8_t* codes, int8_t* scale) {
  float numbers[MAX_HEAD_DIM];
  for (int64_t d = 0; d < head_dim; d++) numbers[d] = as_float(row[d]);
  const float found = encode(numbers, head_dim, codes);
  memcpy(scale, &found, sizeof(found));
}

}  // namespace

template <class T>
void store_kv(const KvLayer<T>& layer, int64_t block_size, int64_t head_dim, int64_t head, int64_t slot, const T* key,
              const T* value) {
  put<T>(layer, block_size, head_dim, layer.start(head, slot / block_size), slot % block_size, key, value);
}

template <class T>
void store_kv(const KvLayer<int8_t>& layer, int64_t block_size, int64_t head_dim, int64_t head, int64_t slot,
              const T* key, const T* value) {
  int8_t keys[MAX_HEAD_DIM], values[MAX_HEAD_DIM];
  int64_t start = layer.start(head, slot / block_size), offset = slot % block_size;
  encode_row(key, head_dim, keys, scale_at(layer.keys + start, block_size, head_dim, offset));
  encode_row(value, head_dim, values, scale_at(layer.values + start, block_size, head_dim, offset));
  put<T>(layer, block_size, head_dim, start, offset, keys, values);
}

template <class T, class S>
void read_kv(const KvLayer<S>& layer, int64_t block_size, int64_t head_dim, int64_t head, int64_t slot, float* key,
             float* value) {
  S keys[MAX_HEAD_DIM], values[MAX_HEAD_DIM];
  int64_t start = layer.start(head, slot / block_size), offset = slot % block_size;
  get<T>(layer, block_size, head_dim, start, offset, keys, values);
  if constexpr (std::is_same_v<S, int8_t>) {
    float scales[2];
    memcpy(&scales[0], scale_at(layer.keys + start, block_size, head_dim, offset), sizeof(float));
    memcpy(&scales[1], scale_at(layer.values + start, block_size, head_dim, offset), sizeof(float));
    for (int64_t d = 0; d < head_dim; d++) key[d] = float(keys[d]) * scales[0], value[d] = float(values[d]) * scales[1];
  } else {
    for (int64_t d = 0; d < head_dim; d++) key[d] = as_float(keys[d]), value[d] = as_float(values[d]);
  }
}

template <class T>
void values_of_keys(const T* keys, int64_t head_dim, T* values) {
  constexpr int depth = DEPTH<T>, width = LANES * depth;  // numbers of a token that are transposed together
  for (int64_t d = 0; d < head_dim; d += width) {
    const int64_t count = head_dim - d < width ? head_dim - d : width;
    IVec words[LANES];
    for (int i = 0; i < LANES; i++) words[i] = i * depth < count ? iload(keys + (d + i * depth) * LANES) : iset(0);
    transpose(words);
    T rows[LANES][width];
    for (int token = 0; token < LANES; token++) istore(rows[token], words[token]);
    for (int token = 0; token < LANES; token += depth) {
      T* to = values + token * head_dim + d * depth;
      for (int64_t i = 0; i < count; i++)
        for (int j = 0; j < depth; j++) to[i * depth + j] = rows[token + j][i];
    }
  }
}

template void values_of_keys(const bf16*, int64_t, bf16*);
template void values_of_keys(const float*, int64_t, float*);
#define NANO_KV_STORE(T)                                                                                            \
  template void store_kv(const KvLayer<T>&, int64_t, int64_t, int64_t, int64_t, const T*, const T*);                 \
  template void store_kv<T>(const KvLayer<int8_t>&, int64_t, int64_t, int64_t, int64_t, const T*, const T*);         \
  template void read_kv<T>(const KvLayer<T>&, int64_t, int64_t, int64_t, int64_t, float*, float*);                   \
  template void read_kv<T>(const KvLayer<int8_t>&, int64_t, int64_t, int64_t, int64_t, float*, float*);
NANO_KV_STORE(bf16)
NANO_KV_STORE(float)

}  // namespace nano
