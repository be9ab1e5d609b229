"""The section `data`: data modules, data sets, transforms, data loaders and statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forgefield.config.nequip.section import NequIPSection, statistic
from forgefield.errors import ForgefieldError

MODULES = ("ASEDataModule", "NequIPDataModule", "sGDML_CCSD_DataModule", "WaterDataModule", "COLLDataModule",
           "NequIP3BPADataModule")  # fmt: skip
DATASETS = ("ASEDataset", "NPZDataset", "HDF5Dataset", "NequIPLMDBDataset", "EMTTestDataset")
TRANSFORMS = (
    "ChemicalSpeciesToAtomTypeMapper", "NeighborListTransform", "NeighborListPruneTransform", "SortedNeighborListTransform",
    "VirialToStressTransform", "StressSignFlipTransform", "AddNaNStressTransform", "NonPeriodicCellTransform",
)  # fmt: skip
STATISTICS = ("CommonDataStatisticsManager", "EnergyOnlyDataStatisticsManager")
LABELS = {"total_energy": "energy", "forces": "forces", "stress": "stress", "virial": "virial"}
"""NequIP's names of labels and Forgefield's."""
SGDML = {name: f"{name}_ccsd" + ("" if name == "aspirin" else "_t")
         for name in ("aspirin", "benzene", "malonaldehyde", "toluene", "ethanol")}  # fmt: skip
OTHER_ORDER = "frames are drawn from the same file by Forgefield's permutation of this seed, which is not PyTorch's."

REST = (
    "the frames that val and test leave are trained on, as NequIP requires sizes that add up to the number of frames."
)
STRUCTURE = {"pos", "atomic_numbers", "cell", "pbc", "atom_types"}


class DataTranslation:
    """Translates the section `data`. values: Forgefield's `data` section. model: NequIP's, whose types and cutoffs are those of
    the data."""

    def __init__(self, section: NequIPSection, model: Mapping[str, Any]) -> None:
        self.section, self.model = section, model
        self.values: dict[str, Any] = {"val": None}
        self.module = section.target(MODULES)
        self.vals: list[Any] = []
        self.tests: list[Any] = []
        self._transforms(section)
        section.integer("seed", 0)
        self._files()
        self._loaders()
        self._statistics()
        section.finish()
        if not self.values.get("units"):
            self.values.pop("units", None)
        if "train" not in self.values:
            raise ForgefieldError(f"{section.file}: '{section.key}' names no training data.")
        if len(self.vals) == 1:
            self.values["val"] = self.vals[0]
        elif self.vals:
            self.values["val"] = {str(index): files for index, files in enumerate(self.vals)}
        if len(self.tests) == 1:
            self.values["test"] = self.tests[0]
        elif self.tests:
            self.values["test"] = {f"test{index}": files for index, files in enumerate(self.tests)}

    def _files(self) -> None:
        section = self.section
        if self.module == "ASEDataModule":
            labels = self._labels(section)
            for split in ("train", "val", "test"):
                self._add(split, section.take(f"{split}_file_path"))
            section.only("predict_file_path", None, "use forgefield predict after the training")
            for part in section.objects("split_dataset"):
                self._split(part, part.take("file_path"))
            self.values |= {"labels": labels} if labels else {}
        elif self.module == "NequIPDataModule":
            for split in ("train", "val", "test"):
                for item in section.objects(f"{split}_dataset"):
                    self._add(split, self._dataset(item))
            section.only("predict_dataset", None, "use forgefield predict after the training")
            for part in section.objects("split_dataset"):
                inner = part.below("dataset")
                if inner is None:
                    raise ForgefieldError(f"{section.file}: '{part.key}.dataset' is missing.")
                self._split(part, self._dataset(inner))
        else:
            self._published()

    def _published(self) -> None:
        """Data modules of published data sets, whose files must exist: nothing is downloaded."""
        section = self.section
        folder = str(section.text("data_source_dir", "")).rstrip("/")
        section.notes[section.path("data_source_dir")] = "files are read from this folder and not downloaded."
        if self.module == "sGDML_CCSD_DataModule":
            name = section.choice("dataset", "", tuple(SGDML))
            self.values["train"] = f"{folder}/{SGDML[name]}-train.npz"
            split = self._pair("train_val_split", 2)
            subset = section.take("trainval_test_subset")
            self.values["val"] = split[1]
            if subset is not None:
                if not isinstance(subset, list) or len(subset) != 2:
                    raise section.wrong("trainval_test_subset", subset, "a list of 2 numbers")
                if all(isinstance(size, int) for size in split) and sum(split) != subset[0]:
                    raise section.refused(
                        "train_val_split", f"must add up to {subset[0]}, the frames of trainval_test_subset"
                    )
                self.values["indices"] = f"0:{subset[0]}"
                section.notes[section.path("trainval_test_subset")] = (
                    "the first frames of the training file are used, and all frames of the test file."
                )
            self.tests.append(f"{folder}/{SGDML[name]}-test.npz")
        elif self.module == "WaterDataModule":
            split = self._pair("train_val_test_split", 3)
            self.values |= {"train": f"{folder}/dataset_1593_eVAng.xyz", "val": split[1], "test": split[2]}
        elif self.module == "COLLDataModule":
            names = {split: f"{folder}/coll_v1.2_AE_{split}.xyz" for split in ("train", "val", "test")}
            self.values |= names
        else:
            chosen = section.choice("train_set", "300K", ("300K", "mixedT"))
            self.values["train"] = f"{folder}/dataset_3BPA/train_{chosen}.xyz"
            self.values["val"] = self._pair("train_val_split", 2)[1]
            names = section.take("test_sets", ["test_300K", "test_600K", "test_1200K", "test_dih"])
            self.values["test"] = {name: f"{folder}/dataset_3BPA/{name}.xyz" for name in names}

    def _pair(self, name: str, count: int) -> list[Any]:
        value = self.section.take(name)
        if not isinstance(value, list) or len(value) != count:
            raise self.section.wrong(name, value, f"a list of {count} numbers")
        _check_sizes(self.section, name, value)
        self.section.notes[self.section.path(name)] = OTHER_ORDER
        return value

    def _add(self, split: str, value: Any) -> None:
        """Files of one split. Several validation sets and test sets keep apart."""
        files = [] if value is None else value if isinstance(value, list) else [value]
        if not files:
            return
        if split != "train":
            (self.tests if split == "test" else self.vals).extend(files)
            return
        if "train" in self.values or len(files) > 1:
            raise ForgefieldError(
                f"{self.section.file}: '{self.section.key}' has several training sets, and NequIP trains on one; join them."
            )
        self.values["train"] = files[0]

    def _split(self, part: NequIPSection, source: Any) -> None:
        if "train" in self.values or self.vals or self.tests:
            raise ForgefieldError(
                f"{part.file}: '{part.key}' splits a file in addition to other data; give each set as a file instead."
            )
        self.values["train"] = source
        sizes = {name: part.take(name) for name in ("train", "val", "test", "predict")}
        if sizes.pop("predict") is not None:
            raise part.refused("predict", "has no counterpart; use forgefield predict after the training")
        part.finish()
        for name, size in sizes.items():
            if size is not None and (isinstance(size, bool) or not isinstance(size, (int, float)) or size <= 0):
                raise part.wrong(name, size, "a share of the frames or a number of frames")
        if sizes["train"] is None:
            raise part.refused("train", "is missing; it is the share or the number of frames to train on")
        _check_sizes(part, "train", [size for size in sizes.values() if size is not None])
        part.notes[part.path("train")] = REST
        self.values["val"] = sizes["val"]
        if sizes["test"] is not None:
            self.values["test"] = sizes["test"]
        part.notes[part.key] = OTHER_ORDER

    def _dataset(self, section: NequIPSection) -> str:
        kind = section.target(DATASETS)
        self._transforms(section)
        if kind == "EMTTestDataset":
            raise section.refused(
                "_target_",
                "is EMTTestDataset, which NequIP computes while it starts; write its frames to a file with ASE (bulk, EMT) "
                "and name that in an ASEDataset",
            )
        path = str(section.text("file_name" if kind == "HDF5Dataset" else "file_path", ""))
        if kind == "ASEDataset":
            labels = self._labels(section)
        elif kind == "NequIPLMDBDataset":
            labels = self._excluded(section)
        else:
            labels = self._renamed(section)
        if labels and self.values.setdefault("labels", labels) != labels:
            raise section.refused("key_mapping", "differs between data sets; labels have the same names in all of them")
        section.finish()
        return path

    def _labels(self, section: NequIPSection) -> dict[str, str]:
        ignored = self._excluded(section)
        arguments = section.mapping("ase_args")
        form = arguments.pop("format", None)
        if form not in (None, "extxyz", "vasp-out", "vasp-xml", "traj", "db", "xyz") or arguments:
            key = next(iter(arguments), "format")
            raise section.refused("ase_args", f"has {key}, which is not supported: the format is detected")
        if form is not None:
            section.notes[section.path("ase_args")] = f"the format of a file is detected; here it must be {form}."
        section.note("include_keys", "values that no target or model uses are not read.", unless=[[]])
        return ignored | self._renamed(section)

    def _excluded(self, section: NequIPSection) -> dict[str, str]:
        """Labels that must not be read."""
        keys = section.take("exclude_keys") or []
        if not isinstance(keys, list):
            raise section.wrong("exclude_keys", keys, "a list of names")
        names = LABELS | {"energy": "energy"}
        if any(key not in names for key in keys):
            section.notes[section.path("exclude_keys")] = "values that no target or model uses are not read."
        return {names[key]: "none" for key in keys if key in names}

    def _renamed(self, section: NequIPSection) -> dict[str, str]:
        labels = {}
        for theirs, field in section.mapping("key_mapping").items():
            if field in LABELS:
                labels[LABELS[field]] = theirs
            elif field not in STRUCTURE:
                raise section.refused("key_mapping", f"maps {theirs} to {field}, which is not trained here")
        return labels

    def _transforms(self, section: NequIPSection) -> None:
        kinds = []
        for item in section.objects("transforms"):
            kind = item.target(TRANSFORMS)
            kinds.append(kind)
            if kind == "ChemicalSpeciesToAtomTypeMapper":
                self._species(item)
            elif kind in ("NeighborListTransform", "SortedNeighborListTransform"):
                self._cutoffs(item)
                item.note("NL", "neighbour lists are computed once, by the fastest program that is installed.")
                item.note("backend", "neighbour lists are computed once, by the fastest program that is installed.")
                item.note("backend_kwargs", "neighbour lists are complete; no program needs a maximum number.")
            elif kind == "NeighborListPruneTransform":
                self._cutoffs(item)
            elif kind == "NonPeriodicCellTransform":
                for name in ("padding", "override_cell"):
                    item.note(name, "the neighbours of frames without periodicity do not depend on a cell.")
            item.finish()
        if kinds:
            self._sign_of_stress(section, kinds)

    def _sign_of_stress(self, section: NequIPSection, transforms: list[str]) -> None:
        flips = transforms.count("StressSignFlipTransform")
        if flips and "VirialToStressTransform" in transforms:
            raise section.refused(
                "transforms", "changes the sign of a stress that it computes from virials; leave out both"
            )
        units = {"stress": "-eV/A^3"} if flips % 2 else {}
        if self.values.setdefault("units", units) != units:
            raise section.refused("transforms", "changes the sign of the stress in some data sets only")

    def _cutoffs(self, item: NequIPSection) -> None:
        """Cutoffs of a neighbour list, which are those of the model here."""
        neighbours = statistic(self.model.get("avg_num_neighbors"))
        if item.peek("per_edge_type_cutoff") is not None and neighbours is not None:
            raise item.refused(
                "per_edge_type_cutoff",
                f"changes the statistic {neighbours}, which counts all neighbours within r_max here; give the numbers that "
                "NequIP logs as training_module.model.avg_num_neighbors",
            )
        for name in ("r_max", "type_names", "per_edge_type_cutoff"):
            item.agree(name, self.model.get(name), f"training_module.model.{name}")

    def _species(self, item: NequIPSection) -> None:
        names = item.take("model_type_names", also=("chemical_symbols",))
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise item.wrong("model_type_names", names, "a list of names")
        mapping = item.mapping("chemical_species_to_atom_type_map") or {name: name for name in names}
        symbols = {kind: symbol for symbol, kind in mapping.items()}
        if len(symbols) != len(mapping) or set(symbols) != set(names):
            raise item.refused(
                "chemical_species_to_atom_type_map",
                "must map one chemical symbol to each type name; types are elements here",
            )
        self.values["species"] = [symbols[name] for name in names]

    def _loaders(self) -> None:
        for name in ("train", "val", "test", "predict"):
            loader = self.section.below(f"{name}_dataloader")
            if loader is None:
                continue
            loader.target(("DataLoader", "StatefulDataLoader"), "torch.utils.data.DataLoader")
            size = loader.integer("batch_size", 1, at_least=1)
            workers = loader.integer("num_workers", at_least=0)
            shuffle = loader.flag("shuffle", False)
            for key in ("pin_memory", "persistent_workers", "prefetch_factor", "timeout", "multiprocessing_context"):
                loader.note(key, "batches are prepared by threads, which do not need it.")
            loader.only("drop_last", False, "every frame is used in every epoch")
            loader.finish()
            if name == "train":
                self.values |= {"batch": {"frames": size}, "shuffle": shuffle}
                self.values |= {} if workers is None else {"workers": workers}
                continue
            if workers is not None:
                loader.notes[loader.path("num_workers")] = "data.workers is that of the training."
            if shuffle:
                loader.notes[loader.path("shuffle")] = "errors do not depend on the order of frames."
            if self.values.setdefault("eval_batch", size) != size:
                loader.notes[loader.path("batch_size")] = (
                    "the batch size of the validation is used; errors do not depend on it."
                )

    def _statistics(self) -> None:
        manager = self.section.below("stats_manager")
        if manager is None:
            return
        manager.target(STATISTICS)
        manager.note("dataloader_kwargs", "statistics do not depend on the size of batches.")
        manager.agree("type_names", self.model.get("type_names"), "training_module.model.type_names")
        manager.finish()


def _check_sizes(section: NequIPSection, name: str, sizes: list[Any]) -> None:
    """Sizes of a split are whole numbers of frames, or shares that add up to 1."""
    if not all(isinstance(size, int) for size in sizes) and abs(sum(sizes) - 1) > 1e-6:
        raise section.refused(
            name, f"and the other shares of the split add up to {sum(sizes):g}; they must add up to 1"
        )
