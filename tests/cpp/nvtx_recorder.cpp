// The smallest of profilers, for emulated.py: NVTX loads it where NVTX_INJECTION64_PATH names it, and it counts the
// ranges of the domain "engram" by name.
#include <nvtx3/nvToolsExt.h>

#include <cstring>
#include <map>
#include <string>

namespace {

std::map<std::string, int> pushed;
int depth = 0;
char engram_domain;

nvtxDomainHandle_t create_domain(const char* name) {
  return reinterpret_cast<nvtxDomainHandle_t>(std::strcmp(name, "engram") ? nullptr : &engram_domain);
}
int push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
  if (reinterpret_cast<char*>(domain) != &engram_domain) return 0;
  ++pushed[event->message.ascii];
  return depth++;
}
int pop(nvtxDomainHandle_t domain) { return reinterpret_cast<char*>(domain) != &engram_domain ? 0 : --depth; }

}  // namespace

// How many ranges of this name there were; of "open": how many have not ended.
extern "C" int nvtx_recorder_count(const char* name) {
  if (std::strcmp(name, "open") == 0) return depth;
  const auto found = pushed.find(name);
  return found == pushed.end() ? 0 : found->second;
}

extern "C" int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (!callbacks || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) return 0;
  *table[NVTX_CBID_CORE2_DomainCreateA] = reinterpret_cast<NvtxFunctionPointer>(create_domain);
  *table[NVTX_CBID_CORE2_DomainRangePushEx] = reinterpret_cast<NvtxFunctionPointer>(push);
  *table[NVTX_CBID_CORE2_DomainRangePop] = reinterpret_cast<NvtxFunctionPointer>(pop);
  return 1;
}
