// The C interface of groups over NCCL.
#include "ffi/nccl/nccl_table.h"

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cuda/nccl/group.h"
#include "ffi/struct_lines.h"

namespace ep_runtime {
namespace {

int64_t Version(const char* library, EpText error) {
  const nccl::Api* api = nullptr;
  const Status status = nccl::Load(library, &api);
  return status.ok() ? api->version : Fail(status, error);
}

Status ReadId(const nccl::Api& api, const EpNcclOptions& options, nccl::Place* place) {
  if (options.num_domains == 0 && options.ep_size == 1) {
    const int result = api.get_unique_id(&place->id);
    return result == nccl::kSuccess ? Status()
                                    : nccl::Failed(api, "ncclGetUniqueId", result, nullptr);
  }
  const int64_t domain = place->world_rank / options.ep_size;
  if (domain >= options.num_domains) {
    return InvalidArgument(
        "ids must hold one id per EP domain, got " + std::to_string(options.num_domains) +
        " and rank " + std::to_string(place->world_rank) + " of domain " + std::to_string(domain));
  }
  std::memcpy(place->id.bytes, options.ids + domain * sizeof(place->id), sizeof(place->id));
  return Status();
}

Status ReadPlaces(const nccl::Api& api, const EpNcclOptions& options,
                  std::vector<nccl::Place>* places) {
  for (int64_t i = 0; i < options.num_local_ranks; ++i) {
    nccl::Place place{};
    place.world_rank = options.local_ranks[i];
    place.device = options.local_devices[i];
    place.ranks = static_cast<int>(options.ep_size);
    place.rank = static_cast<int>(place.world_rank % options.ep_size);
    EP_RETURN_IF_ERROR(ReadId(api, options, &place));
    places->push_back(place);
  }
  return Status();
}

int64_t MakeGroup(const EpNcclOptions* options, EpText error) {
  const nccl::Api* api = nullptr;
  Status status = nccl::Load(options->library, &api);
  nccl::NcclGroupOptions made{
      options->name, options->generation, options->ep_size, options->op_timeout_ns, {}, {}};
  made.purpose = {options->carries_rows != 0, static_cast<int>(options->max_channels)};
  if (status.ok()) status = ReadPlaces(*api, *options, &made.places);
  if (!status.ok()) return Fail(status, error);
  return nccl::ThisProcessGroups().AddGroup(
      nccl::NcclGroup::Make(*api, NcclDevices(), std::move(made)));
}

std::shared_ptr<nccl::NcclGroup> Find(int64_t group) {
  return nccl::ThisProcessGroups().FindGroup(group);
}

int64_t InGroup(int64_t group, EpText error, Status (nccl::NcclGroup::*run)(int64_t),
                int64_t budget_ns) {
  const std::shared_ptr<nccl::NcclGroup> found = Find(group);
  const Status status = found == nullptr
                            ? Stale("no open group has the number " + std::to_string(group))
                            : (found.get()->*run)(budget_ns);
  return status.ok() ? 0 : Fail(status, error);
}

int64_t InitGroup(int64_t group, int64_t budget_ns, EpText error) {
  return InGroup(group, error, &nccl::NcclGroup::Init, budget_ns);
}

int64_t TrySum(int64_t group, int64_t budget_ns, EpText error) {
  return InGroup(group, error, &nccl::NcclGroup::TrySum, budget_ns);
}

int64_t AddLayers(int64_t group, const EpNcclLayer* layers, int64_t count, EpText error) {
  std::vector<nccl::Layer> made;
  for (int64_t i = 0; i < count; ++i) {
    made.push_back({layers[i].id, layers[i].name, layers[i].fingerprint});
  }
  const Status status = nccl::ThisProcessGroups().AddLayers(group, made);
  return status.ok() ? 0 : Fail(status, error);
}

void AbortGroup(int64_t group, const char* why) {
  const std::shared_ptr<nccl::NcclGroup> found = Find(group);
  if (found != nullptr) found->Abort(Status(Code::kAborted, why));
}

int64_t CheckGroup(int64_t group, EpText text) {
  const std::shared_ptr<nccl::NcclGroup> found = Find(group);
  return found == nullptr ? 0 : Say(found->TakeError(), text);
}

void CloseGroup(int64_t group, int64_t timeout_ns) {
  const std::shared_ptr<nccl::NcclGroup> found = nccl::ThisProcessGroups().RemoveGroup(group);
  if (found != nullptr) found->Close(timeout_ns);
}

int64_t AwaitFailure(int64_t group, int64_t timeout_ns, EpText text) {
  const std::shared_ptr<nccl::NcclGroup> found = Find(group);
  Status failure;
  if (found == nullptr || !found->AwaitFailure(timeout_ns, &failure)) return -1;
  return failure.ok() ? 0 : Say(failure.text(), text);
}

void RankLeft(int64_t group, int64_t world_rank, const char* why) {
  const std::shared_ptr<nccl::NcclGroup> found = Find(group);
  if (found != nullptr) found->RankLeft(world_rank, Status(Code::kAborted, why));
}

std::string Structs() {
  return EP_STRUCT_LINES(EpText, data, size) +
         EP_STRUCT_LINES(EpNcclOptions, library, name, generation, ep_size, op_timeout_ns,
                         local_ranks, local_devices, num_local_ranks, ids, num_domains,
                         carries_rows, max_channels) +
         EP_STRUCT_LINES(EpNcclLayer, id, name, fingerprint) +
         EP_STRUCT_LINES(EpNcclTable, abi, bytes, version, make_group, init_group, add_layers,
                         abort_group, check_group, close_group, await_failure, rank_left, try_sum,
                         structs);
}

const char* StructLines() {
  static const std::string all = Structs();
  return all.c_str();
}

}  // namespace
}  // namespace ep_runtime

extern "C" __attribute__((visibility("default"))) const void* EpRuntimeNcclTable() {
  using namespace ep_runtime;  // NOLINT: the table's fields are all from there
  static const EpNcclTable table = {
      kNcclTableAbi, sizeof(EpNcclTable), Version,    MakeGroup,    InitGroup, AddLayers,
      AbortGroup,    CheckGroup,          CloseGroup, AwaitFailure, RankLeft,  TrySum,
      StructLines,
  };
  return &table;
}
