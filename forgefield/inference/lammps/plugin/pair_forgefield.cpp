// SPDX-License-Identifier: GPL-2.0-only
//
// pair_style forgefield: passes the edges of a LAMMPS neighbour list to Forgefield and adds the forces it returns.
//
// This file is compiled against the headers of LAMMPS (https://www.lammps.org), which are distributed under the GNU General
// Public License, version 2. It is therefore distributed under the same license, a copy of which is in the file COPYING next to
// this one: you can redistribute it and modify it under the terms of that version. It comes WITHOUT ANY WARRANTY. No other file
// of Forgefield is derived from LAMMPS.
//
// The file is compiled on the user's machine (forgefield/inference/lammps/plugin.py). Everything physical is computed by
// Python functions (forgefield/inference/lammps/pair_style.py), which are called through the pointers in `Callbacks`.
//
// Ghost atoms that are periodic images of an atom of the same process are replaced by that atom, so that a single process
// evaluates the periodic structure itself. Ghosts of other processes remain; a model with several layers exchanges their
// features and gradients through `forward` and `reverse`.

#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "atom.h"
#include "comm.h"
#include "error.h"
#include "force.h"
#include "lammps.h"
#include "library.h"
#include "memory.h"
#include "neigh_list.h"
#include "neighbor.h"
#include "pair.h"
#include "update.h"

using namespace LAMMPS_NS;

namespace {

constexpr int REQUEST_FULL_LIST = 1;    // NeighConst::REQ_FULL, whose header is not installed with LAMMPS
constexpr int MESSAGE_SIZE = 4096;

// The structs below are repeated in pair_style.py.

struct Opened {
  double cutoff;           // A
  int64_t width;           // numbers per atom of the widest exchange; 0 for a model that needs none
  int64_t several_ranks;   // whether the model can be divided among processes
  int64_t uncertain;       // whether uncertainties are computed
};

struct Step {
  int64_t n_local, n_atoms, n_edges, n_ranks;
  const int64_t *types;          // (n_atoms,) types from 1 on: atoms of this process, then ghosts of others
  const int64_t *source;         // (n_edges,) neighbour
  const int64_t *destination;    // (n_edges,) centre, ascending, below n_local
  const double *vectors;         // (n_edges, 3) from centre to neighbour, A
  double *energies;              // (n_local,) to be set, eV
  double *slopes;                // (n_edges, 3) to be set: derivative of the energy in the vector, eV/A
  double *uncertainties;         // (n_local,) to be set where they are computed: uncertainties of the energies, eV
  void *pair;                    // first argument of the two functions below
  int (*forward)(void *pair, double *rows, int64_t width);    // rows (n_atoms, width): set those of ghosts
  int (*reverse)(void *pair, double *rows, int64_t width);    // add those of ghosts to their owners' rows
};

struct Callbacks {
  int64_t (*open)(int n_words, const char **words, int rank, Opened *, char *message, int size);
  int (*assign)(int64_t model, int n_types, const char **symbols, char *message, int size);
  int (*compute)(int64_t model, Step *, char *message, int size);
  void (*close)(int64_t model);
};

Callbacks callbacks = {};

class PairForgefield : public Pair {
 public:
  explicit PairForgefield(LAMMPS *lmp) : Pair(lmp)
  {
    manybody_flag = 1;
    one_coeff = 1;
    restartinfo = 0;
    single_enable = 0;
    no_virial_fdotr_compute = 1;
    centroidstressflag = CENTROID_NOTAVAIL;    // the virial of an edge is divided equally between its two atoms
  }

  ~PairForgefield() override
  {
    if (allocated) {
      memory->destroy(setflag);
      memory->destroy(cutsq);
    }
    if (model >= 0) callbacks.close(model);
  }

  void settings(int narg, char **arg) override
  {
    if (!callbacks.open) start_interpreter();
    if (model >= 0) callbacks.close(model);
    set_units();
    char message[MESSAGE_SIZE] = "";
    std::vector<const char *> words(arg, arg + narg);
    model = callbacks.open(narg, words.data(), comm->me, &opened, message, MESSAGE_SIZE);
    stop_all_if(model < 0, message);
    if (comm->nprocs > 1 && !opened.several_ranks)
      error->all(FLERR,
                 "pair_style forgefield: this model cannot be divided among {} processes, because it does not exchange "
                 "features of ghost atoms; run it in one process",
                 comm->nprocs);
    // Buffers of LAMMPS are allocated for this many numbers per atom.
    comm_forward = comm_reverse = std::max<int>(2, opened.width);
  }

  void coeff(int narg, char **arg) override
  {
    const int n = atom->ntypes;
    if (narg != 2 + n || strcmp(arg[0], "*") != 0 || strcmp(arg[1], "*") != 0)
      error->all(FLERR,
                 "pair_coeff of pair_style forgefield takes * * and one chemical symbol for each of the {} atom types", n);
    char message[MESSAGE_SIZE] = "";
    std::vector<const char *> symbols(arg + 2, arg + narg);
    const int failed = callbacks.assign(model, n, symbols.data(), message, MESSAGE_SIZE);
    stop_all_if(failed != 0, message);
    if (!allocated) {
      allocated = 1;
      memory->create(setflag, n + 1, n + 1, "forgefield:setflag");
      memory->create(cutsq, n + 1, n + 1, "forgefield:cutsq");
    }
    for (int i = 1; i <= n; i++)
      for (int j = i; j <= n; j++) setflag[i][j] = 1;
  }

  void init_style() override
  {
    set_units();
    if (!force->newton_pair)
      error->all(FLERR, "pair_style forgefield needs newton on: forces on ghost atoms are sent to their owners");
    for (int k = 1; k <= 3; k++)
      if (atom->molecular != Atom::ATOMIC && force->special_lj[k] == 0.0 && force->special_coul[k] == 0.0)
        error->all(FLERR,
                   "special_bonds removes bonded atoms from the neighbour list, but a Forgefield model needs all of them; "
                   "use: special_bonds lj/coul 1.0 1.0 1.0");
    if (neighbor->exclude && comm->me == 0)
      error->warning(FLERR, "neigh_modify exclude removes neighbours that the Forgefield model was trained with");
    neighbor->add_request(this, REQUEST_FULL_LIST);
    communication_checked = false;
  }

  double init_one(int, int) override { return opened.cutoff; }

  void compute(int eflag, int vflag) override
  {
    ev_init(eflag, vflag);
    check_communication();
    collect_atoms();
    collect_edges();
    energies.assign(n_local, 0.0);
    slopes.assign(3 * source.size(), 0.0);
    uncertainties.assign(n_local + 1, 0.0);    // not empty, so that its address can be passed on
    Step step = {};
    step.n_local = n_local;
    step.n_atoms = (int64_t) types.size();
    step.n_edges = (int64_t) source.size();
    step.n_ranks = comm->nprocs;
    step.types = types.data();
    step.source = source.data();
    step.destination = destination.data();
    step.vectors = vectors.data();
    step.energies = energies.data();
    step.slopes = slopes.data();
    step.uncertainties = uncertainties.data();
    step.pair = this;
    step.forward = [](void *pair, double *rows, int64_t width) {
      return ((PairForgefield *) pair)->guarded(&PairForgefield::exchange_forward, rows, (int) width);
    };
    step.reverse = [](void *pair, double *rows, int64_t width) {
      return ((PairForgefield *) pair)->guarded(&PairForgefield::exchange_reverse, rows, (int) width);
    };
    char message[MESSAGE_SIZE] = "";
    const int failed = callbacks.compute(model, &step, message, MESSAGE_SIZE);
    if (communication_error) {
      std::exception_ptr thrown = communication_error;
      communication_error = nullptr;
      std::rethrow_exception(thrown);
    }
    // Not all processes need to fail; this ends the others as well.
    if (failed) error->one(FLERR, "pair_style forgefield: {}", std::string(message));
    for (double &value : uncertainties) value *= energy_unit;
    add_results();
  }

  // For `fix ID group pair N forgefield uncertainty 0`.
  void *extract_peratom(const char *name, int &columns_of_name) override
  {
    if (strcmp(name, "uncertainty") != 0) return nullptr;
    if (!opened.uncertain)
      error->all(FLERR, "pair_style forgefield computes uncertainties only with: pair_style forgefield RUN uncertainty yes");
    columns_of_name = 0;
    return uncertainties.data();
  }

  int pack_forward_comm(int n, int *list, double *buffer, int, int *) override
  {
    for (int i = 0; i < n; i++, buffer += columns)
      memcpy(buffer, &field[(size_t) list[i] * stride + first_column], columns * sizeof(double));
    return n * columns;
  }

  void unpack_forward_comm(int n, int first, double *buffer) override
  {
    for (int i = first; i < first + n; i++, buffer += columns)
      memcpy(&field[(size_t) i * stride + first_column], buffer, columns * sizeof(double));
  }

  int pack_reverse_comm(int n, int first, double *buffer) override
  {
    for (int i = first; i < first + n; i++, buffer += columns)
      memcpy(buffer, &field[(size_t) i * stride + first_column], columns * sizeof(double));
    return n * columns;
  }

  void unpack_reverse_comm(int n, int *list, double *buffer) override
  {
    for (int i = 0; i < n; i++, buffer += columns) {
      double *row = &field[(size_t) list[i] * stride + first_column];
      for (int k = 0; k < columns; k++) row[k] += buffer[k];
    }
  }

 private:
  int64_t model = -1;
  Opened opened = {};
  double energy_unit = 1.0;    // of LAMMPS per eV
  bool communication_checked = false;

  int n_local = 0;
  std::vector<int64_t> types;
  std::vector<int> row_of;       // of every atom of LAMMPS, ghosts included: its row in `types`, or -1 before it is used
  std::vector<int> ghosts;       // atoms of LAMMPS in the rows from n_local on
  std::vector<int64_t> source, destination;
  std::vector<int> neighbours;    // of every edge: the atom of LAMMPS, possibly a ghost
  std::vector<double> vectors, energies, slopes, uncertainties;

  std::vector<double> field;    // what is exchanged: (atoms of LAMMPS, stride)
  int stride = 0, first_column = 0, columns = 0;
  std::exception_ptr communication_error;

  void set_units()
  {
    const std::string units = update->unit_style;
    if (units == "metal")
      energy_unit = 1.0;
    else if (units == "real")
      energy_unit = 23.060549;    // kcal/mol, the factor that LAMMPS uses for other potentials
    else
      error->all(FLERR, "pair_style forgefield works with units metal and real, not with units {}", units);
  }

  // Stop all processes with the message of the first one that failed.
  void stop_all_if(bool failed, const char *message)
  {
    int first = failed ? comm->me : comm->nprocs, least = 0;
    MPI_Allreduce(&first, &least, 1, MPI_INT, MPI_MIN, world);
    if (least == comm->nprocs) return;
    char text[MESSAGE_SIZE] = "";
    if (comm->me == least) strncpy(text, message, MESSAGE_SIZE - 1);
    MPI_Bcast(text, MESSAGE_SIZE, MPI_CHAR, least, world);
    error->all(FLERR, "pair_style forgefield: {}", std::string(text));
  }

  void check_communication()
  {
    if (communication_checked) return;
    communication_checked = true;
    for (int k = 0; k < 3; k++)
      if (comm->cutghost[k] > 0 && comm->get_comm_cutoff() < opened.cutoff)
        error->all(FLERR,
                   "the cutoff of the model is {} A, but ghost atoms are communicated up to {} A only; use: comm_modify "
                   "cutoff {}",
                   opened.cutoff, comm->get_comm_cutoff(), opened.cutoff + neighbor->skin);
  }

  // Which ghosts are images of atoms of this process: every atom sends its process and its index.
  void collect_atoms()
  {
    n_local = atom->nlocal;
    const int n_all = n_local + atom->nghost;
    types.resize(n_local);
    for (int i = 0; i < n_local; i++) types[i] = atom->type[i];
    resize_field(2);
    for (int i = 0; i < n_local; i++) {
      field[2 * i] = comm->me;
      field[2 * i + 1] = i;
    }
    columns = 2;
    first_column = 0;
    comm->forward_comm(this, 2);
    row_of.assign(n_all, -1);
    for (int i = 0; i < n_all; i++)
      if ((int) field[2 * i] == comm->me) row_of[i] = (int) field[2 * i + 1];
    ghosts.clear();
  }

  void collect_edges()
  {
    source.clear();
    destination.clear();
    neighbours.clear();
    vectors.clear();
    double **x = atom->x;
    const double square = opened.cutoff * opened.cutoff;
    for (int ii = 0; ii < list->inum; ii++) {
      const int i = list->ilist[ii];
      if (ii && i <= list->ilist[ii - 1]) error->one(FLERR, "pair_style forgefield: the neighbour list is not sorted by atom");
      for (int jj = 0; jj < list->numneigh[i]; jj++) {
        const int j = list->firstneigh[i][jj] & NEIGHMASK;
        const double d[3] = {x[j][0] - x[i][0], x[j][1] - x[i][1], x[j][2] - x[i][2]};
        if (d[0] * d[0] + d[1] * d[1] + d[2] * d[2] > square) continue;
        if (row_of[j] < 0) {
          row_of[j] = (int) types.size();
          types.push_back(atom->type[j]);
          ghosts.push_back(j);
        }
        source.push_back(row_of[j]);
        destination.push_back(i);
        neighbours.push_back(j);
        vectors.insert(vectors.end(), d, d + 3);
      }
    }
  }

  void add_results()
  {
    double **f = atom->f;
    if (eflag_either)
      for (int i = 0; i < n_local; i++) {
        const double energy = energies[i] * energy_unit;
        if (eflag_global) eng_vdwl += energy;
        if (eflag_atom) eatom[i] += energy;
      }
    for (size_t e = 0; e < source.size(); e++) {
      const int i = (int) destination[e], j = neighbours[e];
      const double *d = &vectors[3 * e];
      double g[3];
      for (int k = 0; k < 3; k++) {
        g[k] = slopes[3 * e + k] * energy_unit;
        f[i][k] += g[k];
        f[j][k] -= g[k];
      }
      if (!vflag_either) continue;
      const double v[6] = {-d[0] * g[0], -d[1] * g[1], -d[2] * g[2], -0.5 * (d[0] * g[1] + d[1] * g[0]),
                           -0.5 * (d[0] * g[2] + d[2] * g[0]), -0.5 * (d[1] * g[2] + d[2] * g[1])};
      for (int k = 0; k < 6; k++) {
        if (vflag_global) virial[k] += v[k];
        if (vflag_atom) {
          vatom[i][k] += 0.5 * v[k];
          vatom[j][k] += 0.5 * v[k];
        }
      }
    }
  }

  void resize_field(int width)
  {
    stride = width;
    field.assign((size_t) (atom->nlocal + atom->nghost) * width, 0.0);
  }

  // At most comm_forward columns at a time: buffers of LAMMPS have room for these.
  template <typename Send> void in_columns(int width, Send send)
  {
    for (first_column = 0; first_column < width; first_column += columns) {
      columns = std::min(comm_forward, width - first_column);
      send(columns);
    }
  }

  void exchange_forward(double *rows, int width)
  {
    resize_field(width);
    std::copy(rows, rows + (size_t) n_local * width, field.begin());
    in_columns(width, [this](int n) { comm->forward_comm(this, n); });
    for (size_t g = 0; g < ghosts.size(); g++) {
      const double *from = &field[(size_t) ghosts[g] * width];
      std::copy(from, from + width, rows + (n_local + g) * width);
    }
  }

  void exchange_reverse(double *rows, int width)
  {
    resize_field(width);
    for (size_t g = 0; g < ghosts.size(); g++) {
      const double *from = rows + (n_local + g) * width;
      std::copy(from, from + width, field.begin() + (size_t) ghosts[g] * width);
    }
    in_columns(width, [this](int n) { comm->reverse_comm(this, n); });
    for (size_t k = 0; k < (size_t) n_local * width; k++) rows[k] += field[k];
  }

  // An exception must not pass through Python: it is kept and thrown again when Python has returned.
  int guarded(void (PairForgefield::*exchange)(double *, int), double *rows, int width)
  {
    try {
      (this->*exchange)(rows, width);
      return 0;
    } catch (...) {
      communication_error = std::current_exception();
      return 1;
    }
  }

  void start_interpreter();
};

// Under plain `lmp` no Python is running yet: start the one this file was compiled for.
void PairForgefield::start_interpreter()
{
  const char *library = FORGEFIELD_LIBPYTHON;
  if (!*library)
    error->all(FLERR,
               "the Python that pair_style forgefield was compiled with has no shared library, so lmp cannot start it; use "
               "forgefield lammps -in FILE instead of lmp");
  void *python = dlopen(library, RTLD_NOW | RTLD_GLOBAL);
  if (!python) error->all(FLERR, "pair_style forgefield cannot load {}: {}", library, dlerror());
  auto initialise = (void (*)(int)) dlsym(python, "Py_InitializeEx");
  auto is_initialised = (int (*)()) dlsym(python, "Py_IsInitialized");
  auto run = (int (*)(const char *)) dlsym(python, "PyRun_SimpleString");
  auto save = (void *(*) ()) dlsym(python, "PyEval_SaveThread");
  if (!initialise || !is_initialised || !run || !save)
    error->all(FLERR, "pair_style forgefield: {} is not a Python library", library);
  if (is_initialised())
    error->all(FLERR, "pair_style forgefield: this Python did not load the pair style; start LAMMPS with forgefield lammps, or "
                      "call forgefield.inference.lammps.pair_style.connect first");
  setenv("PYTHONHOME", FORGEFIELD_PYTHONHOME, 0);
  initialise(0);
  const std::string address = std::to_string((uintptr_t) &callbacks);
  const std::string code = std::string("import sys\nsys.path[:] = ") + FORGEFIELD_PYTHONPATH +
      "\nsys.argv[:] = ['lmp']\nfrom forgefield.inference.lammps.pair_style import connect\nconnect(" + address + ")\n";
  const int failed = run(code.c_str());
  save();    // the callbacks take the lock of the interpreter themselves
  stop_all_if(failed != 0, "Forgefield could not be imported; the error is above");
}

}    // namespace

extern "C" {

void *forgefield_callbacks() { return &callbacks; }

int forgefield_lammps_version() { return FORGEFIELD_LAMMPS_VERSION; }

void forgefield_abort(int code) { MPI_Abort(MPI_COMM_WORLD, code); }

// As in lammpsplugin.h, which is not installed with LAMMPS.
struct lammpsplugin_t {
  const char *version, *style, *name, *info, *author;
  union {
    void *(*v1)(void *);
    void *(*v2)(void *, int, char **);
  } creator;
  void *handle;
};

void lammpsplugin_init(void *lmp, void *handle, void *register_plugin)
{
  const int running = lammps_version(lmp);
  if (running != FORGEFIELD_LAMMPS_VERSION) {
    const std::string text = "pair_style forgefield was compiled for LAMMPS " + std::to_string(FORGEFIELD_LAMMPS_VERSION) +
        " and this is LAMMPS " + std::to_string(running) + "; print the plugin for this version with: forgefield lammps --plugin";
    throw LAMMPSException(text);
  }
  lammpsplugin_t plugin = {};
  plugin.version = ((LAMMPS *) lmp)->version;
  plugin.style = "pair";
  plugin.name = "forgefield";
  plugin.info = "machine-learned potentials of Forgefield";
  plugin.author = "The Forgefield developers";
  plugin.creator.v1 = [](void *lmp) -> void * { return new PairForgefield((LAMMPS *) lmp); };
  plugin.handle = handle;
  ((void (*)(lammpsplugin_t *, void *)) register_plugin)(&plugin, lmp);
}
}
