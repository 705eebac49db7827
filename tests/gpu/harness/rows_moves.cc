// Checks kernels that move and sum rows.
#include "cuda/rows/group_sums.h"
#include "cuda/rows/move_rows.h"
#include "cuda/rows/scaled_sums.h"
#include "rows_case.h"

namespace rows_test {
namespace {

struct MoveCase {
  int tokens;
  int slots;
  int rows;
  int width;
  RowType type;
  bool weighted;
  std::vector<int> source;    // [rows]
  std::vector<int> slot_row;  // [tokens * slots]
  std::vector<float> weights;
  Floats values, others;  // [tokens, width], [rows, width]

  MoveCase(std::mt19937& random, int tokens, int slots, int rows, int width, RowType type)
      : tokens(tokens),
        slots(slots),
        rows(rows),
        width(width),
        type(type),
        weighted(random() % 2),
        source(rows, -1),
        slot_row(int64_t{tokens} * slots, -1),
        weights(slot_row.size()),
        values(type, int64_t{tokens} * width),
        others(type, int64_t{rows} * width) {
    std::normal_distribution<float> normal;
    std::vector<int> places(slot_row.size());
    for (size_t i = 0; i < places.size(); ++i) places[i] = static_cast<int>(i);
    std::shuffle(places.begin(), places.end(), random);
    for (int row = 0; row < std::min<int>(rows, places.size()); ++row) {
      if (random() % 5 == 0) continue;
      source[row] = places[row];
      slot_row[places[row]] = row;
    }
    for (size_t i = 0; i < weights.size(); ++i) {
      weights[i] = slot_row[i] < 0 ? std::nanf("") : normal(random);
    }
    for (int64_t i = 0; i < int64_t{tokens} * width; ++i) values.set(i, normal(random));
    for (int64_t i = 0; i < int64_t{rows} * width; ++i) {
      others.set(i, source[i / width] < 0 ? std::nanf("") : normal(random));
    }
  }
  std::string name(const char* what) const {
    const char* const types[] = {"f32", "bf16", "f16"};
    return std::string(what) + " " + types[static_cast<int>(type)] + (weighted ? " weighted" : "") +
           ", " + std::to_string(tokens) + " tokens, " + std::to_string(slots) + " slots, " +
           std::to_string(rows) + " rows of " + std::to_string(width);
  }
  int64_t row_bytes() const { return int64_t{width} * values.width(); }
};

bool Mismatch(const char* what, int64_t at, double got, double want) {
  std::printf("%s %lld: got %g, want %g\n", what, static_cast<long long>(at), got, want);
  return false;
}

// Whether the value is the reference's f32, rounded once, bit by bit.
bool SameRounded(const char* what, const Floats& got, int64_t at, float want) {
  Floats one(got.type(), 1);
  one.set(0, want);
  const float wanted = one.at(0);
  if (BitsOf(got.at(at)) == BitsOf(wanted)) return true;
  return Mismatch(what, at, got.at(at), wanted);
}

bool CheckGather(const MoveCase& c, bool compared) {
  const Memory source(c.source), values(c.values), others(c.others), weights(c.weights);
  const Memory out(c.rows * c.row_bytes()), products(c.rows * int64_t{sizeof(float)});
  ec::GatherRowsParams params{};
  params.type = c.weighted || compared ? c.type : RowType::kBytes;
  params.rows = c.rows;
  params.tokens = c.tokens;
  params.slots = c.slots;
  params.row_bytes = c.row_bytes();
  params.source = source.as<const int32_t>();
  params.values = values.as();
  params.weights = c.weighted ? weights.as<float>() : nullptr;
  params.others = compared ? others.as() : nullptr;
  params.out = out.as();
  params.products = compared ? products.as<float>() : nullptr;
  if (!RunTwice([&] { return ec::LaunchGatherRows(nullptr, params); }, {&out, &products},
                c.name("gather"))) {
    return false;
  }
  const Floats found(c.type, out.read());
  const Floats sums(RowType::kF32, products.read());
  for (int64_t row = 0; row < c.rows; ++row) {
    const int from = c.source[row];
    const float weight = c.weighted && from >= 0 ? c.weights[from] : 1.0f;
    double sum = 0, size = 0;
    for (int i = 0; i < c.width; ++i) {
      const float x = from < 0 ? 0.0f : c.values.at(int64_t{from / c.slots} * c.width + i);
      const float want = from < 0 ? 0.0f : x * weight;
      if (!SameRounded("gathered", found, row * c.width + i, want)) return false;
      if (from < 0) continue;
      const double product = static_cast<double>(x) * c.others.at(row * c.width + i);
      sum += product;
      size += std::fabs(product);
    }
    if (compared && std::fabs(sums.at(row) - sum) > 1e-6 * size) {
      return Mismatch("product", row, sums.at(row), sum);
    }
  }
  return true;
}

bool CheckSpread(const MoveCase& c, bool compared) {
  const Memory source(c.source), slot_row(c.slot_row), values(c.values), weights(c.weights);
  const Memory others(c.others), out(c.rows * c.row_bytes());
  const Memory products(c.rows * int64_t{sizeof(float)});
  ec::SpreadRowsParams params{};
  params.type = c.weighted || compared ? c.type : RowType::kBytes;
  params.rows = c.rows;
  params.tokens = c.tokens;
  params.slots = c.slots;
  params.row_bytes = c.row_bytes();
  params.source = source.as<const int32_t>();
  params.slot_row = slot_row.as<const int32_t>();
  params.values = values.as();
  params.weights = c.weighted ? weights.as<float>() : nullptr;
  params.others = compared ? others.as() : nullptr;
  params.out = out.as();
  params.products = compared ? products.as<float>() : nullptr;
  if (!RunTwice([&] { return ec::LaunchSpreadRows(nullptr, params); }, {&out, &products},
                c.name("spread"))) {
    return false;
  }
  const Floats sums(RowType::kF32, products.read());
  for (int64_t row = 0; compared && row < c.rows; ++row) {
    double sum = 0, size = 0;
    for (int64_t i = 0; c.source[row] >= 0 && i < c.width; ++i) {
      const double product =
          static_cast<double>(c.values.at(int64_t{c.source[row] / c.slots} * c.width + i)) *
          c.others.at(row * c.width + i);
      sum += product;
      size += std::fabs(product);
    }
    if (!(std::fabs(sums.at(row) - sum) <= 1e-6 * size)) {
      return Mismatch("product", row, sums.at(row), sum);
    }
  }
  const Floats found(c.type, out.read());
  for (int64_t at = 0; at < int64_t{c.rows} * c.width; ++at) {
    const int from = c.source[at / c.width];
    const float weight = c.weighted && from >= 0 ? c.weights[from] : 1.0f;
    const int64_t token = from < 0 ? 0 : from / c.slots;
    const float want = from < 0 ? 0.0f : c.values.at(token * c.width + at % c.width) * weight;
    if (!SameRounded("spread", found, at, want)) return false;
  }
  return true;
}

bool CheckSum(const MoveCase& c) {
  const Memory slot_row(c.slot_row), rows(c.others), weights(c.weights);
  const Memory out(c.tokens * c.row_bytes());
  ec::SumRowsParams params{};
  params.type = c.type;
  params.tokens = c.tokens;
  params.slots = c.slots;
  params.num_rows = c.rows;
  params.row_bytes = c.row_bytes();
  params.slot_row = slot_row.as<const int32_t>();
  params.rows = rows.as();
  params.weights = c.weighted ? weights.as<float>() : nullptr;
  params.out = out.as();
  if (!RunTwice([&] { return ec::LaunchSumRows(nullptr, params); }, {&out}, c.name("sum"))) {
    return false;
  }
  const Floats found(c.type, out.read());
  for (int64_t at = 0; at < int64_t{c.tokens} * c.width; ++at) {
    const int64_t token = at / c.width;
    float total = 0.0f;
    for (int64_t slot = token * c.slots; slot < (token + 1) * c.slots; ++slot) {
      if (c.slot_row[slot] < 0) continue;
      const volatile float product =
          c.others.at(int64_t{c.slot_row[slot]} * c.width + at % c.width) *
          (c.weighted ? c.weights[slot] : 1.0f);
      total += product;
    }
    if (!SameRounded("sum", found, at, total)) return false;
  }
  return true;
}

// Rows have any bytes. Rows without a slot, and some others, are NaN.
bool CheckSumScaled(std::mt19937& random, const MoveCase& c) {
  const int tiles = (c.width + ec::kTile - 1) / ec::kTile;
  std::vector<uint8_t> data(int64_t{c.rows} * c.width);
  std::vector<float> scales(int64_t{c.rows} * tiles);
  for (size_t i = 0; i < data.size(); ++i) {
    data[i] = c.source[i / c.width] < 0 ? 0x7F : static_cast<uint8_t>(random());
  }
  for (float& scale : scales) scale = std::ldexp(1.0f + random() % 8 / 8.0f, random() % 40 - 30);
  const Memory slot_row(c.slot_row), rows(data), scale(scales), out(c.tokens * c.row_bytes());
  ec::SumScaledRowsParams params{};
  params.type = c.type;
  params.tokens = c.tokens;
  params.slots = c.slots;
  params.num_rows = c.rows;
  params.width = c.width;
  params.slot_row = slot_row.as<const int32_t>();
  params.data = rows.as<const uint8_t>();
  params.scale = scale.as<const float>();
  params.out = out.as();
  const auto launch = [&] { return ec::LaunchSumScaledRows(nullptr, params); };
  if (!RunTwice(launch, {&out}, c.name("sum of 8 bits"))) return false;
  const Floats found(c.type, out.read());
  for (int64_t at = 0; at < int64_t{c.tokens} * c.width; ++at) {
    const int64_t token = at / c.width, column = at % c.width;
    float total = 0.0f;
    for (int64_t slot = token * c.slots; slot < (token + 1) * c.slots; ++slot) {
      const int64_t row = c.slot_row[slot];
      if (row < 0) continue;
      const int code = data[row * c.width + column];
      const float size = (code & 0x7F) == 0x7F
                             ? std::nanf("")
                             : static_cast<float>(Decoded(code & 0x7F, Fp8Format::kE4M3));
      const volatile float value =
          (code & 0x80 ? -size : size) * scales[row * tiles + column / ec::kTile];
      total += value;
    }
    if (std::isnan(total) && std::isnan(found.at(at))) continue;
    if (!SameRounded("sum of 8 bits", found, at, total)) return false;
  }
  return true;
}

// Checks sums of every expert's rows against f64. Slack is NaN.
bool CheckGroupSums(std::mt19937& random, const Slabs& slabs, RowType type, int width,
                    const std::string& name) {
  const int groups = slabs.slabs * slabs.groups;
  const int experts = random() % 2 ? groups : slabs.groups;
  std::normal_distribution<float> normal;
  Floats values(type, slabs.all_rows() * width);
  std::vector<double> wanted(int64_t{experts} * width), sizes(wanted.size());
  for (int64_t at = 0; at < slabs.all_rows() * width; ++at) {
    const int owner = slabs.owner[at / width];
    values.set(at, owner < 0 ? std::nanf("") : normal(random));
    if (owner < 0) continue;
    const int64_t to = int64_t{owner % experts} * width + at % width;
    wanted[to] += values.at(at);
    sizes[to] += std::fabs(values.at(at));
  }
  const Memory on_device(slabs.sizes), x(values);
  const Memory sums(static_cast<int64_t>(wanted.size() * sizeof(float)));
  const ec::GroupSumsParams params{type,    slabs.On(on_device), width, experts, x.as(),
                                   nullptr, sums.as<float>()};
  if (!RunTwice([&] { return ec::LaunchGroupSums(nullptr, params); }, {&sums}, name)) return false;
  const Floats found(RowType::kF32, sums.read());
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (!(std::fabs(found.at(i) - wanted[i]) <= 1e-6 * sizes[i])) {
      return Mismatch("sum", i, found.at(i), wanted[i]);
    }
  }
  return true;
}

}  // namespace

void CheckMoves(std::mt19937& random, int count, Tally* tally) {
  const RowType types[] = {RowType::kBF16, RowType::kF16, RowType::kF32};
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  for (int i = 0; i < count; ++i) {
    const int tokens = 1 + below(200), slots = 1 + below(below(4) == 0 ? 100 : 9);
    const int rows = 1 + below(tokens * std::min(slots, 9) + 20);
    const int width = 8 * (1 + below(below(3) == 0 ? 300 : 12));
    const MoveCase c(random, tokens, slots, rows, width, types[below(3)]);
    const bool compared = below(2) == 0;
    tally->Add(CheckGather(c, compared), c.name(compared ? "gather and compare" : "gather"));
    tally->Add(CheckSpread(c, compared), c.name(compared ? "spread and compare" : "spread"));
    tally->Add(CheckSum(c), c.name("sum"));
    tally->Add(CheckSumScaled(random, c), c.name("sum of 8 bits"));
    const Slabs slabs = RandomSlabs(random);
    const std::string name = "sums of " + std::to_string(slabs.groups) + " groups, " +
                             std::to_string(slabs.used) + " rows of " + std::to_string(c.width);
    tally->Add(CheckGroupSums(random, slabs, c.type, c.width, name), name);
  }
}

}  // namespace rows_test
