// Energy and forces of a model exported with `forgefield export RUN --to aoti -o model.pt2`, without Python.
//
//   g++ -std=c++20 evaluate.cpp -o evaluate \
//       $(python -c "import torch; from torch.utils.cpp_extension import include_paths; print(*('-I' + p for p in include_paths()))") \
//       -L$TORCH/lib -Wl,-rpath,$TORCH/lib -ltorch -ltorch_cpu -lc10     # TORCH: folder of the Python package torch
//   ./evaluate model.pt2
//
// The structure is a dimer without periodic images; a program would take positions and neighbours from its own lists.
#include <iostream>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: evaluate MODEL.pt2\n";
    return 2;
  }
  torch::NoGradGuard no_grad;
  torch::inductor::AOTIModelPackageLoader model(argv[1]);
  for (const auto& [key, value] : model.get_metadata()) {
    if (key == "species" || key == "cutoff" || key == "units") std::cout << key << ": " << value << "\n";
  }
  const auto real = torch::kFloat64;
  const auto whole = torch::kInt64;
  const auto positions = torch::tensor({0.0, 0.0, 0.0, 0.0, 0.0, 2.5}, real).view({2, 3});
  const auto species = torch::tensor({0, 0}, whole);
  const auto frame = torch::zeros({2}, whole);
  const auto n_atoms = torch::tensor({2}, whole);
  const auto cell = torch::zeros({1, 3, 3}, real);
  const auto edge_index = torch::tensor({1, 0, 0, 1}, whole).view({2, 2});  // source, destination
  const auto edge_shift = torch::zeros({2, 3}, real);
  const auto outputs = model.run({positions, species, frame, n_atoms, cell, edge_index, edge_shift});
  // Outputs are in the order of their sorted names: atomic_energy, energy, forces, stress.
  std::cout.precision(15);
  std::cout << "energy: " << outputs[1].item<double>() << " eV\n";
  std::cout << "force on atom 1 along z: " << outputs[2][1][2].item<double>() << " eV/A\n";
  return 0;
}
