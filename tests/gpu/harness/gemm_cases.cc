// The grouped products that are checked.
#include "gemm_cases.h"

#include <algorithm>
#include <random>

namespace gemm_test {

const char* Name(GemmProduct product) {
  switch (product) {
    case GemmProduct::kForward:
      return "forward";
    case GemmProduct::kDataGrad:
      return "data grad";
    case GemmProduct::kWeightGrad:
      return "weight grad";
  }
  return "?";
}

const char* Name(FloatType type) {
  switch (type) {
    case FloatType::kF32:
      return "f32";
    case FloatType::kBF16:
      return "bf16";
    case FloatType::kF16:
      return "f16";
    case FloatType::kE4M3:
      return "e4m3";
    case FloatType::kE5M2:
      return "e5m2";
    case FloatType::kTF32:
      return "tf32";
  }
  return "?";
}

const char* Name(Kind kind) {
  switch (kind) {
    case Kind::kWide:
      return "16-bit";
    case Kind::kTensor:
      return "fp8 tensor";
    case Kind::kBlock:
      return "fp8 block";
    case Kind::kTf32:
      return "tf32";
  }
  return "?";
}

namespace {

GemmCase Tuned(GemmCase c) {
  c.tuning = ec::TunedGemm(c.Params());
  return c;
}

GemmCase MakeCase(const char* name, GemmProduct product, std::vector<int> sizes, int rows, int in,
                  int out, Kind kind) {
  GemmCase c;
  c.name = name;
  c.product = product;
  c.slab_rows = rows;
  c.experts = static_cast<int>(sizes.size());
  c.in_features = in;
  c.out_features = out;
  c.sizes = std::move(sizes);
  if (kind == Kind::kTf32) {
    c.type = c.rhs_type = FloatType::kTF32;
    c.out_type = FloatType::kF32;
  } else if (kind != Kind::kWide) {
    c.type = c.rhs_type = FloatType::kE4M3;
    c.scaling = kind == Kind::kTensor ? GemmScaling::kTensor : GemmScaling::kBlock;
  }
  return Tuned(c);
}

// Features must be multiples of 16 bytes of operands.
int Multiple(Kind kind) { return kind == Kind::kWide ? 8 : kind == Kind::kTf32 ? 4 : 16; }

std::vector<GemmCase> Shapes(GemmProduct p, Kind kind) {
  const auto wide = [&](int features) { return features / 8 * Multiple(kind); };
  std::vector<GemmCase> cases;
  const auto add = [&](const char* name, std::vector<int> sizes, int rows, int in, int out) {
    cases.push_back(MakeCase(name, p, std::move(sizes), rows, in, out, kind));
  };
  add("one tile", {128}, 128, wide(64), 256);
  add("one pair of tiles", {256}, 256, 256, 256);
  add("halves of 64 in one tile", {70, 0, 130}, 256, wide(72), 128);
  add("ring goes round", {1024}, 1024, 1024, 1024);
  add("zones of 128", {256, 128, 0, 384, 0}, 1024, 512, 768);
  add("zones of 16", {16, 240, 0, 48, 144, 400}, 1000, 192, 320);
  add("any sizes", {1, 63, 64, 65, 0, 127, 129, 300}, 800, wide(200), wide(328));
  add("odd tiles beside each other", {384, 128}, 512, wide(520), wide(776));
  add("no rows at all", {0, 0, 0}, 256, 128, 128);
  add("more than the slab holds", {200, 300, 100}, 400, 128, 256);
  add("smallest features", {5, 7}, 16, wide(8), wide(8));
  add("two slabs, shared experts", {100, 0, 60, 33, 200, 17}, 300, wide(136), wide(264));
  cases.back().slabs = 2;
  cases.back().experts = 3;
  cases.back() = Tuned(cases.back());
  cases.push_back(cases.back());
  cases.back().name = "two slabs, own experts";
  cases.back().experts = 6;
  cases.back() = Tuned(cases.back());
  add("a gate that ends within a box", {1, 0, 200, 129, 63}, 400, 192, 400);
  std::vector<int> many(300);
  for (int i = 0; i < 300; ++i) many[i] = i % 13;
  add("many groups", many, 2048, 64, 128);
  add("ranges for the queue", std::vector<int>(40, 130), 5300, 128, 512);
  return cases;
}

// Adds the case with the other types, and with other kernels of one type, that it can have.
void AddWide(const GemmCase& c, std::vector<GemmCase>* all) {
  for (const FloatType type : {FloatType::kBF16, FloatType::kF16}) {
    for (const FloatType out : {type, FloatType::kF32}) {
      if (type == FloatType::kBF16 && out == type) continue;
      GemmCase other = c;
      other.type = other.rhs_type = type;
      other.out_type = out;
      all->push_back(Tuned(other));
    }
  }
}

void AddNarrow(const GemmCase& c, std::vector<GemmCase>* all) {
  const bool by_expert = c.product == GemmProduct::kWeightGrad;
  for (const FloatType gradient : {FloatType::kE4M3, FloatType::kE5M2}) {
    for (const FloatType out : {FloatType::kBF16, FloatType::kF32}) {
      if (gradient == FloatType::kE4M3 && out == FloatType::kBF16) continue;
      if (gradient == FloatType::kE5M2 && c.product == GemmProduct::kForward) continue;
      GemmCase other = c;
      (by_expert ? other.rhs_type : other.type) = gradient;
      other.out_type = out;
      other.whole_numbers = gradient == FloatType::kE4M3;
      all->push_back(other);
    }
  }
}

// Adds cases of tf32, which have one kernel. Whole numbers show which products there were.
void AddTf32(const GemmCase& c, std::vector<GemmCase>* all) {
  GemmCase other = c;
  other.whole_numbers = true;
  other.tuning.band = 3;
  all->push_back(other);
}

GemmCase RandomCase(std::mt19937& random, Kind kind) {
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  GemmCase c = MakeCase("random", kProducts[below(3)], {}, 0, 0, 0, kind);
  const bool wide = kind == Kind::kWide;
  const bool narrow = !wide && kind != Kind::kTf32;
  c.slabs = 1 + (below(4) == 0);
  const int groups = 1 + below(12);
  c.experts = below(3) == 0 ? groups : groups * c.slabs;
  const int multiple = Multiple(kind);
  c.in_features = multiple * (1 + below(800 / multiple));
  c.out_features = multiple * (1 + below(800 / multiple));
  const int alignment = 1 << below(9);
  int most = 0;
  for (int slab = 0; slab < c.slabs; ++slab) {
    int sum = 0;
    for (int g = 0; g < groups; ++g) {
      c.sizes.push_back(below(3) == 0 ? 0 : below(400) / alignment * alignment);
      sum += c.sizes.back();
    }
    most = std::max(most, sum);
  }
  c.slab_rows = std::max(1, most + below(200) - 20);
  c.bias = c.product == GemmProduct::kForward && below(2) == 0;
  c.clear_slack = c.product == GemmProduct::kDataGrad && below(2) == 0;
  c.whole_numbers = !wide && below(2) == 0;
  const int way = below(4);
  if (way == 0) c.out_type = FloatType::kF32;
  if (wide && way == 2) c.type = c.rhs_type = c.out_type = FloatType::kF16;
  if (narrow && c.product != GemmProduct::kForward && below(2) == 0) {
    (c.product == GemmProduct::kWeightGrad ? c.rhs_type : c.type) = FloatType::kE5M2;
  }
  c = Tuned(c);
  c.tuning.band = 1 + below(9);
  if (c.out_features >= 128 && below(4) == 0) {
    c.out_features = c.out_features / 128 * 128;
    c.pair = c.can_be_pair();
  }
  return c;
}

}  // namespace

std::vector<GemmCase> FixedCases(GemmProduct product, Kind kind, bool small) {
  std::vector<GemmCase> all;
  for (const GemmCase& c : Shapes(product, kind)) {
    all.push_back(c);
    if (small) continue;
    if (kind == Kind::kWide) {
      AddWide(c, &all);
    } else if (kind == Kind::kTf32) {
      AddTf32(c, &all);
    } else {
      AddNarrow(c, &all);
    }
    GemmCase other = c;
    other.bias = product == GemmProduct::kForward;
    other.clear_slack = product == GemmProduct::kDataGrad;
    if (product != GemmProduct::kWeightGrad) all.push_back(other);
  }
  const size_t alone = all.size();
  for (size_t i = 0; i < alone; ++i) {
    if (!all[i].can_be_pair()) continue;
    GemmCase pair = all[i];
    pair.pair = true;
    all.push_back(pair);
  }
  return all;
}

std::vector<GemmCase> RandomCases(Kind kind, int count) {
  std::mt19937 random(1);
  std::vector<GemmCase> cases;
  for (int i = 0; i < count; ++i) cases.push_back(RandomCase(random, kind));
  return cases;
}

}  // namespace gemm_test
