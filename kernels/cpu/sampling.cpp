// Choice of one token per row of logits: greedy, or by the inverse cumulative distribution after top-k, top-p and min-p.
//
// The specification is kernels/sampling.py. All sums run in one fixed order in fp64 and the exponential is our own, so a row
// gives the same token on every machine. One row is the work of one thread.
#include "api.h"
#include "simd.h"
#include "team.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace baton {
namespace {

constexpr double kMinusInf = -std::numeric_limits<double>::infinity();

// e^x for x <= 0, within 2 units in the last place; 0 below -700. Range reduction by ln 2 in two parts, then the Taylor series to
// degree 13. Written without branches so that the compiler can take several at once.
inline double exp_of_negative(double x) {
  const double clamped = x < -700.0 ? -700.0 : x;
  const double shifted = clamped * 1.4426950408889634 + 6755399441055744.0;  // the integer lands in the low bits
  const double n = shifted - 6755399441055744.0;
  const double r = (clamped - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  double y = 1.6059043836821613e-10;
  y = y * r + 2.0876756987868100e-09;
  y = y * r + 2.5052108385441720e-08;
  y = y * r + 2.7557319223985888e-07;
  y = y * r + 2.7557319223985893e-06;
  y = y * r + 2.4801587301587302e-05;
  y = y * r + 1.9841269841269841e-04;
  y = y * r + 1.3888888888888889e-03;
  y = y * r + 8.3333333333333332e-03;
  y = y * r + 4.1666666666666664e-02;
  y = y * r + 1.6666666666666666e-01;
  y = y * r + 0.5;
  y = y * r + 1.0;
  y = y * r + 1.0;
  int64_t bits;
  std::memcpy(&bits, &shifted, 8);
  const int64_t exponent = ((bits & 0x7ff) ^ 0x400) - 0x400 + 1023;  // n lies in [-1010, 0]: eleven bits with sign
  const int64_t scale_bits = int64_t(uint64_t(exponent) << 52);
  double scale;
  std::memcpy(&scale, &scale_bits, 8);
  return x < -700.0 ? 0.0 : y * scale;
}

// The largest value; NaN anywhere in the row makes it NaN.
float largest_of(const float* values, int64_t count) {
  F8 most = splat(-std::numeric_limits<float>::infinity()), sum = zero8();
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const F8 value = load8(values + i);
    most = max8(value, most);
    sum = add8(sum, mul8(value, zero8()));  // NaN if any value is NaN or infinite
  }
  float largest = max_of8(most), check = sum8(sum);
  for (; i < count; ++i) largest = std::max(largest, values[i]), check += values[i] * 0.0f;
  if (check == check) return largest;
  for (i = 0; i < count; ++i)  // minus infinity is a forbidden token, NaN a broken one
    if (values[i] != values[i]) return values[i];
  return largest;
}

class Row {
 public:
  Row(const float* logits, int64_t vocab_size) : logits_(logits), vocab_size_(vocab_size) {}

  // The token, or -1 if the row has no finite largest value.
  int64_t sample(const BatonDraw& draw) {
    largest_ = largest_of(logits_, vocab_size_);
    if (!(std::abs(largest_) <= std::numeric_limits<float>::max())) return -1;
    if (draw.temperature == 0.0) return std::find(logits_, logits_ + vocab_size_, largest_) - logits_;
    keep_all_or_top_k(draw.top_k);
    weights_.resize(ids_.size());
    const double largest = largest_, temperature = draw.temperature;
    for (size_t i = 0; i < ids_.size(); ++i) weights_[i] = (double(logits_[ids_[i]]) - largest) / temperature;
    for (size_t i = 0; i < ids_.size(); ++i) weights_[i] = exp_of_negative(weights_[i]);
    if (draw.top_p < 1.0) keep_nucleus(draw.top_p);
    if (draw.min_p > 0.0) keep_if([&](size_t i) { return weights_[i] >= draw.min_p; });
    const double total = sum();
    const double target = draw.noise * total;
    double cumulative = 0.0;
    for (size_t i = 0; i < ids_.size(); ++i) {
      cumulative += weights_[i];
      // The product can round up to the total; the last token with weight then stands for the missing one.
      if (cumulative > target || cumulative == total) return ids_[i];
    }
    return ids_.back();
  }

 private:
  void keep_all_or_top_k(int64_t top_k) {
    ids_.clear();
    if (top_k <= 0 || top_k >= vocab_size_) {
      ids_.resize(vocab_size_);
      for (int64_t i = 0; i < vocab_size_; ++i) ids_[i] = int32_t(i);
      return;
    }
    std::vector<float> values(logits_, logits_ + vocab_size_);
    std::nth_element(values.begin(), values.begin() + (top_k - 1), values.end(), std::greater<float>());
    const float border = values[top_k - 1];
    int64_t num_equal = top_k - std::count_if(logits_, logits_ + vocab_size_, [&](float value) { return value > border; });
    for (int64_t i = 0; i < vocab_size_; ++i)
      if (logits_[i] > border || (logits_[i] == border && num_equal-- > 0)) ids_.push_back(int32_t(i));
  }

  double sum() const {
    double total = 0.0;
    for (double weight : weights_) total += weight;
    return total;
  }

  template <typename F>
  void keep_if(F&& is_kept) {
    size_t kept = 0;
    for (size_t i = 0; i < ids_.size(); ++i)
      if (is_kept(i)) ids_[kept] = ids_[i], weights_[kept] = weights_[i], ++kept;
    ids_.resize(kept), weights_.resize(kept);
  }

  // Keeps the shortest prefix of the order by falling weight (lowest id first among equals) whose sum reaches top_p of the total.
  // A nucleus is usually a few hundred tokens, so growing prefixes are sorted before everything is.
  void keep_nucleus(double top_p) {
    const double target = top_p * sum();
    std::vector<int32_t> order(ids_.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = int32_t(i);
    const auto comes_first = [&](int32_t a, int32_t b) { return weights_[a] > weights_[b] || (weights_[a] == weights_[b] && a < b); };
    double cumulative = 0.0;
    size_t sorted = 0, length = 0;
    for (size_t prefix = 256; length == 0; prefix *= 16) {
      prefix = std::min(prefix, order.size());
      std::partial_sort(order.begin() + sorted, order.begin() + prefix, order.end(), comes_first);
      for (; sorted < prefix && length == 0; ++sorted) {
        cumulative += weights_[order[sorted]];
        if (cumulative >= target) length = sorted + 1;
      }
      if (prefix == order.size() && length == 0) length = prefix;
    }
    std::vector<char> is_kept(ids_.size(), 0);
    for (size_t i = 0; i < length; ++i) is_kept[order[i]] = 1;
    keep_if([&](size_t i) { return is_kept[i]; });
  }

  const float* logits_;
  const int64_t vocab_size_;
  float largest_ = 0.0f;
  std::vector<int32_t> ids_;  // ascending
  std::vector<double> weights_;
};

}  // namespace
}  // namespace baton

void baton_sample(const float* logits, int64_t num_rows, int64_t vocab_size, const BatonDraw* draws, int64_t* token_ids, int threads) {
  using namespace baton;
  parallel(num_rows == 1 ? 1 : threads, [&](Crew& crew) {
    crew.each(num_rows, [&](int64_t row) { token_ids[row] = Row(logits + row * vocab_size, vocab_size).sample(draws[row]); });
  });
}
