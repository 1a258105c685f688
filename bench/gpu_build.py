"""gpu_build.py -- programs for a CUDA device: built here, packed for a machine without a network, unpacked there

    build(run)       kernels by nvcc, programs by cc, into run.programs
    pack(run)        the same for 9.0, and all of them in one file, build/gpu.tar.xz
    unpack(run)      that file's programs, into build/gpu; refused if it was packed from another tree
"""

import glob
import hashlib
import importlib.metadata
import json
import lzma
import os
import shlex
import shutil
import subprocess
import sys
import tarfile

from gpu_run import DEVICE_LIST, Failed, TOP

sys.path.insert(0, os.path.join(TOP, 'tests', 'cuda'))
import sass  # pylint: disable=wrong-import-position

PACK = os.path.join(TOP, 'build', 'gpu.tar.xz')
KEPT = os.path.join(TOP, 'build', 'gpu.kept')  # cubins and SASS of what was packed
PACK_BYTES = 20 << 20
MANIFEST = 'manifest.json'
SOURCES = ('upipe', 'examples', 'tests', 'bench')  # whose files a pack depends on
SUFFIXES = ('.h', '.c', '.cu', '.cpp', '.py', '.txt')
WINDOW = 1 << 27  # bytes over which xz finds the kernels that every program has again
C_FLAGS = ['-std=c11', '-D_POSIX_C_SOURCE=200809L', '-O2', '-g1', '-Wall', '-DUPIPE_WITH_CUDA', '-DUPIPE_CPU_DECLARE',
           '-DUPIPE_SOURCE_ROOT="."']


def device_tests():
    """Source files of tests/cuda whose programs run on a device, in order: those of nvcc, those of a C compiler."""
    with open(DEVICE_LIST, encoding='utf-8') as source:
        names = source.read().split()
    return [name for name in names if name.endswith('.cpp')], [name for name in names if name.endswith('.c')]


def stem(path):
    return os.path.splitext(os.path.basename(path))[0]


# ---- what is installed ----

def nvcc():
    found = shutil.which('nvcc') or '/usr/local/cuda/bin/nvcc'
    if not os.access(found, os.X_OK):
        raise Failed('there is no nvcc on the path or in /usr/local/cuda')
    return found


def toolkit():
    return os.path.dirname(os.path.dirname(os.path.realpath(nvcc())))


def find(patterns):
    return next((path for pattern in patterns for path in sorted(glob.glob(pattern))), None)


def nccl():
    """The folder of the NCCL library; None if it or its header is not where compiler or toolkit look."""
    header = find([f'{folder}/nccl.h' for folder in ('/usr/include', '/usr/local/include', f'{toolkit()}/include')])
    library = find([f'{folder}/libnccl.so' for folder in ('/usr/lib*', '/usr/lib/*', '/usr/local/lib',
                                                          f'{toolkit()}/lib64')])
    return os.path.dirname(library) if header and library else None


def frontend(options):
    """The folder of cudnn-frontend's headers; None if they or cuDNN are not there."""
    folder = options.cudnn_frontend
    if not folder:
        try:
            folder = str(importlib.metadata.distribution('nvidia-cudnn-frontend').locate_file('include'))
        except importlib.metadata.PackageNotFoundError:
            return None
    library = find([f'{toolkit()}/lib64/libcudnn.so', '/usr/lib/*/libcudnn.so'])
    return folder if library and os.path.exists(os.path.join(folder, 'cudnn_frontend.h')) else None


def jansson():
    """How to link it: whole, where the archive is there, as the machine with the device may lack it. None: not there."""
    archive = find(['/usr/lib/*/libjansson.a', '/usr/lib*/libjansson.a', '/usr/local/lib/libjansson.a'])
    shared = find(['/usr/lib/*/libjansson.so', '/usr/lib*/libjansson.so', '/usr/local/lib/libjansson.so'])
    return [archive] if archive else ['-ljansson'] if shared else None


# ---- build ----

class Plan:
    """What is compiled, and what is linked from it."""

    def __init__(self, run, arch):
        self.run, self.arch = run, arch
        self.flags = shlex.split(os.environ.get('CFLAGS', ''))
        self.cc, self.cxx = shutil.which('cc') or 'gcc', shutil.which('c++') or 'g++'
        self.kernels = {}  # object -> command of nvcc
        self.serial = {}  # the same of kernels whose products are serialized on purpose
        self.units = {}  # object -> command of a host compiler
        self.links = {}  # program -> objects and libraries

    def nvcc_command(self, source, made, top=TOP):
        return [nvcc(), '-x', 'cu', '-std=c++17', '-O3', '-lineinfo', '-Wno-deprecated-gpu-targets',
                f'-gencode=arch=compute_{self.arch},code=sm_{self.arch}', '-I', top, '-c', os.path.join(top, source),
                '-o', made]

    def kernel(self, name, source):
        """The object of a unit with kernels: Meson's, if its folder was given."""
        built = self.run.options.objects
        if built:
            name = '09_cuda.cu.o' if name == '09_cuda.o' else os.path.join('tests', 'cuda',
                                                                           f'device_{stem(source)}.cpp.o')
            path = os.path.join(built, name)
            if not os.path.exists(path):
                raise Failed(f'Meson has not built {path}')
            return path
        path = os.path.join(self.run.programs, name)
        self.kernels[path] = self.nvcc_command(source, path)
        return path

    def unit(self, name, source, flags=()):
        path = os.path.join(self.run.programs, f'{name}.main.o')
        places = ['-I', TOP, '-I', os.path.join(TOP, 'tests'), '-isystem', f'{toolkit()}/include']
        cpu = ['-mavx2', '-mfma'] if os.uname().machine == 'x86_64' else []
        self.units[path] = [self.cc, *C_FLAGS, *cpu, *self.flags, *flags, *places, '-c', os.path.join(TOP, source),
                            '-o', path]
        return path

    def host_cpp(self, name, source, headers):
        path = os.path.join(self.run.programs, name)
        self.units[path] = [self.cxx, '-std=c++17', '-O1', '-DCUDNN_FRONTEND_SKIP_JSON_LIB', *self.flags, '-I', TOP,
                            '-isystem', headers,
                            '-isystem', f'{toolkit()}/include', '-c', os.path.join(TOP, source), '-o', path]
        return path

    def link_command(self, name):
        return [self.cxx, *self.links[name], '-o', os.path.join(self.run.programs, name), f'-L{toolkit()}/lib64',
                '-Wl,-rpath,/usr/local/cuda/lib64', f'-Wl,-rpath,{toolkit()}/lib64', '-lcublas', '-lcudart', '-lm',
                '-lpthread']


def plan(run, arch):
    made = Plan(run, arch)
    first, programs = device_tests()
    tables = [made.kernel('09_cuda.o', 'examples/09_cuda.cu'), made.unit('upipe_cpu', 'upipe/cpu/upipe_cpu.c')]
    for source in first:
        made.links[stem(source)] = [made.kernel(f'{stem(source)}.o', f'tests/cuda/{source}')]
    for source in ['bench/gpu.c', 'examples/compare/compare.c', 'examples/09_cuda.c',
                   *(f'tests/cuda/{name}' for name in programs)]:
        # the verdict's oracle is dense, and the device waits for it
        made.links[stem(source)] = [made.unit(stem(source), source, ['-O3'] if source.endswith('verdict.c') else []),
                                     *tables]
    if nccl():
        made.links['08_nccl'] = [made.unit('08_nccl', 'examples/08_nccl.c'), *tables, f'-L{nccl()}',
                                 f'-Wl,-rpath,{nccl()}', '-lnccl']
    else:
        run.report('left out: 08_nccl, as NCCL is not installed')
    if jansson():
        made.links['train'] = [made.unit('train', 'examples/train/train.c'), *tables, *jansson()]
    else:
        run.report('left out: train, as jansson is not installed')
    headers = frontend(run.options)
    if headers:
        more = ['-lcudnn', '-lnvrtc']
        made.links['gpu_cudnn'] = [made.unit('gpu_cudnn', 'bench/gpu.c', ['-DWITH_CUDNN']),
                                   made.host_cpp('cudnn.o', 'bench/gpu_cudnn.cpp', headers), *tables, *more]
        made.links['03_plug_cudnn'] = [made.host_cpp('03_plug_cudnn.o', 'examples/03_plug_cudnn.cpp', headers), *tables,
                                       *more]
    else:
        run.report('left out: cuDNN beside ours, as it or cudnn-frontend is not installed')
    return made


# Every product of warpgroups waits for the one before: a kernel that is right so, and wrong otherwise, has a hazard.
COMMIT = 'asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");'
SERIAL = COMMIT + ' asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");'


def plan_serial(made):
    """The verdict over a copy of the kernels that is changed so."""
    folder = made.run.programs
    top, path = os.path.join(folder, 'serial'), os.path.join(folder, 'serial.o')
    shutil.rmtree(top, ignore_errors=True)
    shutil.copytree(os.path.join(TOP, 'upipe'), os.path.join(top, 'upipe'))
    os.makedirs(os.path.join(top, 'examples'))
    shutil.copy(os.path.join(TOP, 'examples', '09_cuda.cu'), os.path.join(top, 'examples'))
    header = os.path.join(top, 'upipe', 'cuda', 'upipe_cuda_wgmma.h')
    with open(header, encoding='utf-8') as source:
        text = source.read()
    if text.count(COMMIT) != 1:
        raise Failed(f'{header} does not commit products as the script expects')
    with open(header, 'w', encoding='utf-8') as out:
        out.write(text.replace(COMMIT, SERIAL))
    made.serial[path] = made.nvcc_command('examples/09_cuda.cu', path, top)
    main, _, cpu = made.links['verdict']
    made.links['verdict_serial'] = [main, path, cpu]


def compile_all(run, jobs):
    """Pairs of name and command, side by side. Returns the names of those that failed."""
    ends = run.side_by_side(lambda job: run.call(*job), jobs, os.cpu_count() or 1)
    return [name for (name, _), status in zip(jobs, ends) if status != 0]


def named(commands):
    return [(os.path.basename(path), command) for path, command in commands.items()]


def check_machine_code(run, compiled):
    """Whether the compiler has undone an overlap or spilled: figures are then not what the kernels could give."""
    status = run.call('sass', [sys.executable, os.path.join(TOP, 'tests', 'cuda', 'sass.py'), compiled])
    if status == 77:
        run.report('left out: the check of the machine code, as cuobjdump and nvdisasm are not installed')
    elif status != 0:
        run.report('warning: the machine code is not what it should be; the run goes on')


def build(run, packing=False):
    os.makedirs(run.programs, exist_ok=True)
    arch = '90' if packing else (run.ask_driver('compute_cap') or '8.0').replace('.', '')
    made = plan(run, '90a' if arch == '90' else arch)  # Hopper's own instructions
    if packing:
        plan_serial(made)
    gates = [sys.executable, os.path.join(TOP, 'tests', 'cuda', 'nvcc.py')]  # fails where ptxas serializes products
    strict = ['-Werror=all-warnings', '-Xptxas=-warn-spills']
    kernels = {path: [*gates, *command, *strict] for path, command in made.kernels.items()}
    bad = compile_all(run, named(kernels) + named(made.serial) + named(made.units))
    warned = {path: command for path, command in made.kernels.items()
              if os.path.basename(path) in bad and run.left() != 0}  # out of time is no warning
    if warned:
        run.report(f'warning: {" ".join(map(os.path.basename, warned))} compiled without the checks of warnings, spills '
                   'and serialized products')
        bad = [name for name in bad if name not in map(os.path.basename, warned)] + compile_all(run, named(warned))
    if bad:
        raise Failed(f'failed: {" ".join(bad)}')
    if '09_cuda.o' in map(os.path.basename, made.kernels) and made.arch == '90a':
        check_machine_code(run, os.path.join(run.programs, '09_cuda.o'))
    bad = compile_all(run, [(f'link_{name}', made.link_command(name)) for name in made.links])
    if bad:
        raise Failed(f'failed: {" ".join(bad)}')
    return made


# ---- pack ----

def sources_hash():
    """Of every file that programs are made of, or that runs them: the same in a copy of the tree."""
    whole = hashlib.sha256()
    for top in SOURCES:
        for folder, folders, names in os.walk(os.path.join(TOP, top)):
            folders[:] = sorted(name for name in folders if name not in ('__pycache__', 'results'))
            for name in sorted(names):
                if name.endswith(SUFFIXES):
                    path = os.path.join(folder, name)
                    with open(path, 'rb') as source:
                        whole.update(os.path.relpath(path, TOP).encode() + b'\0' + source.read() + b'\0')
    return whole.hexdigest()


def commit():
    done = subprocess.run(['git', '-C', TOP, 'describe', '--always', '--dirty', '--abbrev=40'], capture_output=True,
                          text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else 'unknown'


def keep_machine_code(run, objects):
    """The cubins and their SASS, so that the code that ran can be read afterwards."""
    shutil.rmtree(KEPT, ignore_errors=True)
    try:
        tools = [sass.tool(name, os.path.join(TOP, 'build', 'disassembler')) for name in ('cuobjdump', 'nvdisasm')]
        for path in objects:
            folder = os.path.join(KEPT, stem(path))
            os.makedirs(folder)
            subprocess.run([os.path.abspath(tools[0]), '-xelf', 'all', path], cwd=folder, check=True,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for cubin in sorted(glob.glob(os.path.join(folder, '*.cubin'))):
                with open(f'{cubin}.sass', 'w', encoding='utf-8') as out:
                    subprocess.run([tools[1], '-c', cubin], stdout=out, check=True)
    except (sass.Missing, OSError, subprocess.CalledProcessError) as reason:
        run.report(f'left out: cubins and SASS ({reason})')


def add(archive, name, path):
    entry = archive.gettarinfo(path, name)
    entry.mtime = entry.uid = entry.gid = 0
    entry.uname = entry.gname = ''
    with open(path, 'rb') as source:
        archive.addfile(entry, source)


def pack(run):
    if not nccl() or not jansson():
        raise Failed('a pack needs NCCL and jansson, with their headers: without them no training step would run')
    made = build(run, packing=True)
    keep_machine_code(run, [*made.kernels, *made.serial])
    manifest = {'commit': commit(), 'sources': sources_hash(), 'nvcc': nvcc_release(run),
                'programs': sorted(made.links)}
    with open(os.path.join(run.programs, MANIFEST), 'w', encoding='utf-8') as out:
        json.dump(manifest, out, indent=1)
    filters = [{'id': lzma.FILTER_LZMA2, 'preset': 3, 'dict_size': WINDOW}]
    with lzma.open(PACK + '.part', 'wb', filters=filters) as out, tarfile.open(fileobj=out, mode='w') as archive:
        for name in [MANIFEST, *sorted(made.links)]:
            add(archive, name, os.path.join(run.programs, name))
    size = os.path.getsize(PACK + '.part')
    if size > PACK_BYTES:
        raise Failed(f'the pack has {size / 2**20:.1f} MiB, more than {PACK_BYTES >> 20}')
    os.replace(PACK + '.part', PACK)
    run.report(f'wrote {os.path.relpath(PACK, TOP)}: {len(made.links)} programs of commit {manifest["commit"]}, '
               f'{size / 2**20:.1f} MiB')


def nvcc_release(run):
    done = run.launch([nvcc(), '--version'])
    return done.out.strip().splitlines()[-1] if done.status == 0 else 'unknown'


def unpack(run):
    if not os.path.exists(PACK):
        raise Failed(f'there is no {os.path.relpath(PACK, TOP)}: run gpu.py --pack where nvcc is')
    os.makedirs(run.programs, exist_ok=True)
    try:
        with tarfile.open(PACK, 'r:xz') as archive:
            manifest = json.load(archive.extractfile(MANIFEST))
            if manifest['sources'] != sources_hash():
                raise Failed(f'{os.path.relpath(PACK, TOP)} was packed from other sources (commit {manifest["commit"]}, or '
                             'changes on top of it): run gpu.py --pack again where nvcc is')
            archive.extraction_filter = getattr(tarfile, 'data_filter', None)  # Python 3.11.4 and later
            archive.extractall(run.programs)
    except (tarfile.TarError, lzma.LZMAError, EOFError, KeyError, ValueError) as error:
        raise Failed(f'{os.path.relpath(PACK, TOP)} is no whole pack ({type(error).__name__}: {error}): copy it again') from error
    run.report(f'unpacked {len(manifest["programs"])} programs of commit {manifest["commit"]}')
