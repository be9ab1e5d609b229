"""An architecture in one folder, as another package could bring it: model, options, a hook for kernels, an importer."""
