// What the parts of the device know of each other.
#pragma once

#include <map>
#include <optional>
#include <string>

#include <ATen/core/Generator.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include "memory.h"

namespace c10d {
class Backend;
}

namespace late {

void resize(const c10::Storage& storage, size_t nbytes);

// The generator of the CPU that operators draw from where `random` is asked for.
at::Generator twin_of(const std::optional<at::Generator>& random);

// How often each operator ran late, and how often (under "now: NAME") the host waited for it.
std::map<std::string, int64_t> operators();

// Collectives whose bytes `carrier` takes from rank to rank.
c10::intrusive_ptr<c10d::Backend> collectives(c10::intrusive_ptr<c10d::Backend> carrier);

}  // namespace late
