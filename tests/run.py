#!/usr/bin/env python3
"""run.py [--full | --all] [--only NAME...] [--list] -- builds and runs the tests; run.sh installs what it needs and calls it

parts() says what is built, and which tests run there. Every setup, build and test is a job, which takes a core, or
several: a build all of them, what runs processes as many as these. One core more is shared out than there is, as some jobs
wait for deadlines; the longest first; a test waits for nothing but its own build. Seconds of the last run are kept in
build/times.json; until there is one, tests/times.json says what to expect, which is a copy of that of another machine. What
each job prints is in build/logs. The screen has how long it will take, a line of progress, what failing jobs print, and the
end, with a line for each failure.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'))
from checks import wait_for  # pylint: disable=wrong-import-position
from launch import alive  # pylint: disable=wrong-import-position

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILD = os.path.join(TOP, 'build')
TIMES = os.path.join(BUILD, 'times.json')
SHIPPED_TIMES = os.path.join(TOP, 'tests', 'times.json')
SLOWNESS = int(os.environ.get('UPIPE_SLOWNESS') or 100) / 100  # of this machine, beside the one of the shipped times
LOGS = os.path.join(BUILD, 'logs')
CORES = os.cpu_count() or 1
SHARES = CORES + 1
PROCESSES = 8  # of a test of the suites below, at most
WIDE = {'net', 'links', 'mutants'}
# The suites whose PyTorch is installed for them (lib/pytorch.py).
INSTALLED = {'oldest', 'newest'} if os.environ.get('UPIPE_INSTALL') == 'yes' else set()
SKIPPED = 77
QUIET = 9  # seconds without a line, at most
MOST_LINES = 30  # of failures at the end

# Warnings are the plain builds' business: instrumented code draws false ones. Optimizing it takes longer than it saves, but
# for the kernels (meson.build).
INSTRUMENTED = ['-Dwerror=false', '-Doptimization=0']
ASAN = ['-Db_sanitize=address,undefined', '-Dc_args=-fno-sanitize-recover=all']
# What a program forgets to set is the same garbage every time, instead of what an earlier call has left.
PATTERN = '-ftrivial-auto-var-init=pattern'
CXX = {'gcc': 'g++', 'clang': 'clang++'}
SLOW = 4  # how much longer a test may take in instrumented and emulated programs
MODES = ('ordinary', 'full', 'all')
# Random draws: the least that counts, the same for slow instruments, and the seconds for more. Fuzzing, planted bugs,
# failing calls and lost ranks take as long as they are given.
BUDGETS = {
    'ordinary': {'UPIPE_DRAWS_MIN': '200', 'UPIPE_SECONDS': '8', 'UPIPE_FUZZ_SECONDS': '2', 'UPIPE_FAULT_SECONDS': '0',
                 'UPIPE_WORLD_TRIES': '2'},
    'full': {'UPIPE_FULL': '1', 'UPIPE_DRAWS_MIN': '800', 'UPIPE_SECONDS': '20', 'UPIPE_FUZZ_SECONDS': '10',
             'UPIPE_FAULT_SECONDS': '30', 'UPIPE_MUTANTS_SECONDS': '80', 'UPIPE_WORLD_TRIES': '4'},
    'all': {'UPIPE_FULL': '1', 'UPIPE_DRAWS_MIN': '20000', 'UPIPE_SECONDS': '1200', 'UPIPE_FUZZ_SECONDS': '60',
            'UPIPE_FAULT_SECONDS': '1200', 'UPIPE_MUTANTS': 'all', 'UPIPE_WORLD_TRIES': '200'},
}
SLOW_BUDGETS = {'ordinary': {'UPIPE_DRAWS_MIN': '20'}, 'full': {'UPIPE_DRAWS_MIN': '60', 'UPIPE_SECONDS': '8'},
                'all': {'UPIPE_DRAWS_MIN': '1000'}}


def has(program):
    return shutil.which(program) is not None


def packaged(name):
    return subprocess.run(['pkg-config', '--exists', name], check=False).returncode == 0


def starts(flag, wrapper=(), compiler='gcc'):
    """Do programs of this sanitizer start here? Some kernels lay out memory as gcc's runtime does not expect."""
    with tempfile.TemporaryDirectory() as folder:
        unit, program = os.path.join(folder, 'empty.c'), os.path.join(folder, 'empty')
        with open(unit, 'w', encoding='utf-8') as out:
            out.write('int main(void) { return 0; }\n')
        if subprocess.run([compiler, flag, unit, '-o', program], capture_output=True, check=False).returncode != 0:
            return False
        return subprocess.run([*wrapper, program], capture_output=True, check=False).returncode == 0


def thread_wrapper():
    return [] if starts('-fsanitize=thread') else ['setarch', '-R']


def wide():
    """gcc takes the widest vectors that this machine has. Where these are AVX-512's, AVX2 is clang's."""
    with open('/proc/cpuinfo', encoding='utf-8') as info:
        return 'avx512f' in info.read()


def nvcc():
    return has('nvcc') or os.path.exists('/usr/local/cuda/bin/nvcc')


def end_group(group):
    """Kills it. Before that its processes end one after the other with SIGABRT, of which Python's say where they are."""
    try:
        os.killpg(group, signal.SIGSTOP)
        for pid in map(int, filter(str.isdigit, os.listdir('/proc'))):
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(pid) == group:
                    os.kill(pid, signal.SIGABRT)
                    os.kill(pid, signal.SIGCONT)
                    wait_for(lambda: not alive(pid), 3)  # pylint: disable=cell-var-from-loop
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


class Part:
    """A build and the tests that run there: suites in the full run, and those of the ordinary run, by suite or name."""

    def __init__(self, name, options, full, ordinary='', without='', compiler='gcc', slow=1, wrapper=(), builds=(),
                 needs=None, of=None):
        self.name, self.options, self.compiler = name, list(options), compiler
        self.full, self.ordinary, self.without = full.split(), ordinary.split(), without.split()
        self.slow, self.wrapper, self.builds = slow, wrapper, list(builds)
        self.needs = needs  # (asks whether it can run here, what is missing otherwise)
        self.folder = os.path.join(BUILD, of or name)

    def tests(self, known, mode):
        """Of the tests of a build, those of this part. `without` is what the ordinary run leaves to the full one."""
        chosen = self.full if mode != 'ordinary' else self.ordinary
        left = self.without if mode == 'ordinary' else []
        return [t for t in known if (t['name'] in chosen or set(suites(t)) & set(chosen)) and t['name'] not in left]

    def wrap(self):
        return self.wrapper() if callable(self.wrapper) else list(self.wrapper)


def parts():
    x86 = platform.machine() in ('x86_64', 'AMD64')
    avx2 = ['-Dsimd=avx2'] if x86 and wide() else []
    valgrind = ['valgrind', '--quiet', '--error-exitcode=9', '--leak-check=full', '--track-origins=yes']
    pattern = [f'-Dc_args={PATTERN}', f'-Dcpp_args={PATTERN}'] if starts(PATTERN) else []
    cross = ['--cross-file', os.path.join(TOP, 'tests/aarch64.txt'), '-Dmpi=disabled', '-Dexamples=disabled']
    return [
        # The tests' own loops profit little from optimization, which takes two thirds of the time to compile them; kernels ask
        # for it themselves. Some of the emulator's longest repeat in another order what others do.
        Part('gcc', ['-Doptimization=0', *pattern],
             full='compile unit bf16 fuzz property programs faults weights simt fake net links mutants bench',
             ordinary='compile unit property programs faults simt fake net pytorch',
             without='headers_cuda nccl_versions cudnn_plug faults_tcp faults_mpi cuda_seeds cuda_attn_small_race cuda_attn_on_90 '
                     'cuda_attn_masks_on_90 cuda_attn90_race cuda_attn90_bwd_race cuda_linear_layer cuda_linear_race '
                     'cuda_train_ops_race'),
        Part('asan', [*INSTRUMENTED, *ASAN], full='unit fuzz property programs simt fake',
             ordinary='mem comm a2a fpdt mistakes mlp safetensors files fuzz', slow=SLOW,
             needs=(lambda: starts('-fsanitize=address,undefined'), 'AddressSanitizer does not start here')),
        Part('tsan', [*INSTRUMENTED, '-Dexamples=disabled', '-Db_sanitize=thread'], full='threads',
             ordinary='comm a2a side_stream', slow=SLOW, wrapper=thread_wrapper,
             needs=(lambda: starts('-fsanitize=thread', thread_wrapper()), 'ThreadSanitizer does not start here')),
        # Bytes and plans depend on the instructions that a machine has: those of most machines, where this one has more.
        *([Part('avx2', ['-Doptimization=0', *avx2], full='dry planner', ordinary='dry planner', builds=['examples/upipe-plan'])]
          if avx2 else []),
        # What users compile: all optimizations, and another compiler. What computes: the others' checks are of words and
        # files, which do not depend on the compiler.
        Part('gcc-O3', [], full='layer ring fpdt llama checkpoint loading',
             builds=['examples/train', 'examples/logits', 'examples/compare', 'examples/upipe-plan',
                     'examples/libupipe_abi.so.0']),
        Part('clang', avx2, full='kernels ring fpdt checkpoint loading train', compiler='clang',
             needs=(lambda: has('clang'), 'clang is missing')),
        # clang's sanitizers see more: offsets from NULL, and inputs that nobody thought of. Without kernels, which take
        # minutes to compile so.
        Part('clang-asan', [*INSTRUMENTED, *ASAN, '-Db_lundef=false', '-Dexamples=disabled'], full='libfuzzer shard plan mem',
             compiler='clang', slow=SLOW,
             needs=(lambda: has('clang++') and starts('-fsanitize=address,undefined,fuzzer-no-link', compiler='clang'),
                    'clang or its sanitizers are missing')),
        # On clang's build: valgrind knows AVX2, but not AVX-512, and takes what has gcc's pattern for set.
        Part('valgrind', avx2, full='memcheck', compiler='clang', of='clang', slow=10, wrapper=valgrind,
             needs=(lambda: has('valgrind') and has('clang'), 'valgrind or its build is missing')),
        # The kernels without vector instructions of their own, the product by a BLAS through the same table entry, plain
        # C, and another processor's vectors.
        Part('portable', ['-Doptimization=1', '-Dsimd=portable'], full='kernels'),
        Part('cblas', ['-Doptimization=1', '-Dcblas=enabled'], full='products',
             needs=(lambda: packaged('openblas'), 'OpenBLAS is missing')),
        Part('scalar', ['-Doptimization=1', '-Dexamples=disabled', '-Dsimd=scalar'], full='lanes', slow=SLOW),
        Part('neon', ['-Doptimization=1', *cross], full='lanes', slow=SLOW, wrapper=['qemu-aarch64', '-L', '/usr/aarch64-linux-gnu'],
             needs=(lambda: has('aarch64-linux-gnu-gcc') and has('qemu-aarch64'),
                    'the cross compiler or qemu-aarch64 is missing')),
        # The other MPI, and nothing that goes over TCP.
        Part('mpich', ['-Doptimization=1', '-Dmpi_package=mpich'], full='mpi world_mpi abi_mpi 08_mpi',
             needs=(lambda: has('mpirun.mpich') and packaged('mpich'), 'MPICH is missing')),
        # Kernels for devices: compiled for all of them, linked, and run where there is one (bench/gpu.py measures).
        # nvcc optimizes these whatever the rest does.
        Part('cuda', ['-Doptimization=1', '-Dcuda=enabled'], full='device', builds=['device_programs'], needs=(nvcc, 'nvcc is missing')),
    ]


def suites(test):
    return [suite.split(':')[-1] for suite in test['suite']]


def places_of(said):
    """Of each process of Python that SIGABRT has ended, in which function it was, and in which line of a test or binding."""
    places = {}
    for process in said.split('Fatal Python error: Aborted')[1:]:
        stacks = re.findall(r'^(?:Current t|T)hread .*\n((?:  File .*\n)+)', process, re.M) or ['']  # the main thread's is the last
        frames = re.findall(r'File "(.*)", line (\d+) in (.*)', stacks[-1]) or [('', '', '?')]
        own = next((f' at {os.path.basename(path)}:{line}' for path, line, _ in frames if '/site-packages/' not in path
                    and path.startswith(TOP)), '')
        places[frames[0][2] + own] = None
    return ', in ' * bool(places) + ', '.join(places)


def sentence_of(said, status):
    """What a failure says first: with a place in a file, or of an error, or whatever it says."""
    lines = [line.strip() for line in said.split('\n') if line.strip()]
    if lines and re.match('killed after', lines[-1]):
        return lines[-1] + places_of(said)
    for pattern in r'\S+:\d+(:\d+)?: (?!warning|note)', r'.*(ERROR|[Ee]rror\b|WARNING: \w+Sanitizer)':
        found = [line for line in lines if re.match(pattern, line)]
        if found:
            return found[0].removeprefix('../../')
    return lines[0] if lines else f'status {status}'


def failure_lines(failures, option):
    """For each (name, sentence) the command that runs it again; names for which there is no line share the last."""
    command = ' '.join(['sh tests/run.sh', *option, '--only'])
    shown = failures if len(failures) <= MOST_LINES else failures[:MOST_LINES - 1]
    lines = [f'{command} {name}  # {sentence[:200]}' for name, sentence in shown]
    rest = [name for name, _ in failures[len(shown):]]
    return lines + [f'{command} {" ".join(dict.fromkeys(rest))}  # {len(rest)} more'] * bool(rest)


def about(seconds):
    """In seconds, or in minutes."""
    return f'{seconds:.0f} s' if seconds < 100 else f'{seconds / 60:.0f} min'


def times_of(path, mode):
    """{job: (seconds, seconds of processors)} of a run of this mode, which is kept there; none where there is no such file."""
    try:
        with open(path, encoding='utf-8') as file:
            return {**json.load(file).get(mode, {})}
    except (OSError, ValueError):
        return {}


class Job:
    """Something for some cores. `run` returns (status, what it printed, seconds of processors)."""

    def __init__(self, name, run, guess=60.0, after=(), alone=False, cores=1):
        self.name, self.run, self.guess, self.after, self.alone = name, run, guess, list(after), alone
        self.cores = min(cores, max(CORES, 2))  # never two such at once on one core
        self.status, self.said, self.seconds, self.cpu, self.began = None, '', 0.0, 0.0, 0.0
        self.test, self.again = None, ''


class Runner:
    def __init__(self, mode, began):
        self.mode, self.began = mode, began
        self.running, self.over, self.children = [], [], set()
        self.lock = threading.Condition()
        self.last = time.time()
        self.terminal = sys.stdout.isatty()
        self.times = times_of(TIMES, mode)
        self.known = {name: [SLOWNESS * seconds for seconds in took]
                      for name, took in times_of(SHIPPED_TIMES, mode).items()} | self.times
        self.expected, self.finished = {}, 0.0  # seconds of processors by job of a whole run; of those that have ended

    def say(self, words):
        print('\r\033[K' * self.terminal + words, flush=True)
        self.last = time.time()

    def progress(self, done, total):
        """A terminal's last line says it all the time; elsewhere a line when nothing else was said."""
        names = ', '.join(f'{job.name} {time.time() - job.began:.0f} s' for job in self.running)
        words = f'[{time.time() - self.began:.0f} s] {done} of {total} done{self.left()}; running: {names}'
        if self.terminal:
            print('\r\033[K' + words[:shutil.get_terminal_size().columns - 1], end='', flush=True)
        elif time.time() - self.last >= QUIET - 0.5:
            self.say(words)

    def left(self):
        """The share of a whole run's seconds that are over, and the time that is left: by the pace so far, once it has one."""
        if not self.expected:
            return ''
        share = min(self.finished / sum(self.expected.values()), 1)
        left = (time.time() - self.began) * (1 / share - 1) if share > 0.05 else self.estimate() * (1 - share)
        return f', {100 * share:.0f} % of the seconds; some {about(left)} left'

    def estimate(self):
        """Seconds of a whole run, in which processors are idle a tenth of the time; no fewer than those of its longest job."""
        return max(1.1 * sum(self.expected.values()) / CORES, *self.expected.values())

    def command(self, words, folder, env=None, limit=None):
        """Runs a command in a group of its own, which is killed when time is up."""
        with tempfile.TemporaryFile() as log:
            child = subprocess.Popen(words, cwd=folder, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                     env={**os.environ, 'PYTHONFAULTHANDLER': '1', **(env or {})}, start_new_session=True)
            self.children.add(child.pid)
            late = []

            def stop():
                late.append(f'\nkilled after {limit:.0f} s: it hangs\n')
                with contextlib.suppress(ProcessLookupError):
                    end_group(child.pid)

            timer = threading.Timer(limit or 1e6, stop)
            timer.daemon = True
            timer.start()
            # with the processor's time, of which a busy machine takes no more than an idle one
            _, status, used = os.wait4(child.pid, 0)
            timer.cancel()
            timer.join()
            child.returncode = os.waitstatus_to_exitcode(status)
            self.children.discard(child.pid)
            log.seek(0)
            said = log.read().decode(errors='replace') + ''.join(late)
            return child.returncode or len(late), said, used.ru_utime + used.ru_stime

    def work(self, job):
        try:
            result = job.run()
        except Exception as wrong:  # what a job cannot do is its failure, not the run's end
            result = 1, f'{type(wrong).__name__}: {wrong}\n', 0.0
        with self.lock:
            job.status, job.said, job.cpu = result
            job.seconds = time.time() - job.began
            self.over.append(job)  # first: it is always in one of the two
            self.running.remove(job)
            self.lock.notify()

    def ready(self, job):
        return all(other.status == 0 for other in job.after)

    def drop_hopeless(self, waiting):
        """What waits for something that failed does not run; that failure is counted once."""
        gone = [job for job in waiting if any(other.status not in (None, 0) for other in job.after)]
        for job in gone:
            waiting.remove(job)
            self.finished += self.expected.get(job.name, 0)
        return len(gone)

    def go(self, jobs, ended):
        """Runs jobs, and those that `ended` adds for one that has ended."""
        waiting = list(jobs)
        done, total = 0, len(waiting)
        while waiting or self.running or self.over:
            with self.lock:
                total -= self.drop_hopeless(waiting)
                choice = sorted((job for job in waiting if self.ready(job)), key=lambda job: (job.alone, -job.guess))
                wide = False  # one waits for another
                for job in choice:
                    if wide and job.cores > 1:
                        continue
                    if self.running and (job.alone or any(r.alone for r in self.running)):
                        break
                    if job.alone and any(not other.alone for other in waiting):
                        break
                    if sum(r.cores for r in self.running) + job.cores > SHARES:
                        if any(r.cores > 1 for r in self.running):
                            wide = True
                            continue
                        break  # cores are left to it
                    waiting.remove(job)
                    self.running.append(job)
                    job.began = time.time()
                    threading.Thread(target=self.work, args=(job,), daemon=True).start()
                if not self.over:
                    self.lock.wait(0.5)
                finished, self.over = self.over, []
            for job in finished:
                done += 1
                self.finished += self.expected.get(job.name, 0)
                more = ended(job)
                waiting += more
                total += len(more)
            self.progress(done, total)

    def kill(self):
        for pid in list(self.children):
            try:
                os.killpg(pid, signal.SIGKILL)
            except OSError:
                pass


class Session:
    def __init__(self, options):
        self.mode = 'all' if options.all else 'full' if options.full else 'ordinary'
        self.only = [name.partition(':')[::2] for name in options.only]  # (name, functions of these tests)
        self.runner = Runner(self.mode, float(os.environ.get('UPIPE_RUN_BEGAN', time.time())))
        self.groups = {}  # part -> suite -> jobs
        self.passed = self.skipped = 0
        self.failures = []  # (what runs it again, what it says)
        self.cpu = 0.0
        self.left = set()
        self.builds = {}
        self.installs = {}  # suite -> job

    # ---- builds ----

    def made_of(self, part):
        version = subprocess.run([part.compiler, '--version'], capture_output=True, text=True, check=False).stdout
        meson = subprocess.run(['meson', '--version'], capture_output=True, text=True, check=True).stdout
        flags = [os.environ.get(name, '') for name in ('CFLAGS', 'CXXFLAGS', 'LDFLAGS')]
        return json.dumps([TOP, version.split('\n')[0], meson.strip(), part.options, flags])

    def setup(self, part):
        """The build's folder, made anew where it was made of something else or somewhere else."""
        stamp, made_of = os.path.join(part.folder, 'made_of'), self.made_of(part)
        try:
            with open(stamp, encoding='utf-8') as file:
                same = file.read() == made_of
        except OSError:
            same = False
        if same:
            return self.runner.command(['ninja', 'build.ninja'], part.folder)  # new where a meson.build is
        shutil.rmtree(part.folder, ignore_errors=True)
        cuda = [] if any(option.startswith('-Dcuda=') for option in part.options) else ['-Dcuda=disabled']
        status, said, cpu = self.runner.command(['meson', 'setup', part.folder, TOP, *cuda, *part.options], TOP,
                                           {'CC': part.compiler, 'CXX': CXX[part.compiler]})
        if status == 0:
            with open(stamp, 'w', encoding='utf-8') as file:
                file.write(made_of)
        return status, said, cpu

    def described(self, part, what):
        with open(os.path.join(part.folder, f'meson-info/intro-{what}.json'), encoding='utf-8') as file:
            return json.load(file)

    def compile(self, part, tests, builds):
        """What these tests need, and nothing else."""
        files = {target['id']: target['filename'] for target in self.described(part, 'targets')}
        wanted = {file for test in tests for name in test['depends'] for file in files.get(name, [])}
        wanted = sorted(os.path.relpath(file, part.folder) for file in wanted) + builds
        if not wanted:
            return 0, '', 0.0
        # the longest build would else be alone with its core, at last
        return self.runner.command(['ninja', '-j', str(CORES), *wanted], part.folder)

    # ---- what runs ----

    def names(self, part, test):
        return {test['name'], 'test_' + test['name'], part.name, f"{part.name}/{test['name']}", *suites(test),
                *(f'{part.name}/{suite}' for suite in suites(test))}

    def functions(self, part, test):
        """Those that are asked for, '' for all."""
        asked = [functions for name, functions in self.only if name in self.names(part, test)]
        return '' if '' in asked else ','.join(asked)

    def chosen(self, part, known):
        asked = {name for name, _ in self.only}
        return [test for test in part.tests(known, self.mode) if not asked or asked & self.names(part, test)]

    def absent(self, every, known):
        """Of the names that are asked for, those that this run does not have, and the option of one that has them."""
        for name, functions in self.only:
            modes = [mode for mode in MODES if any(name in self.names(part, test) for part in every
                                                   for test in part.tests(known, mode))]
            if self.mode not in modes:
                yield ':'.join(filter(None, (name, functions))), f'--{modes[0]} ' if modes else ''

    def environment(self, part):
        budget = dict(BUDGETS[self.mode])
        if part.slow > 1:  # ten seconds here are one elsewhere: the ordinary run's amount
            budget |= SLOW_BUDGETS[self.mode]
            budget.pop('UPIPE_FULL', None)
            budget['TEST_BRIEF'] = '1'
        return {name: os.environ.get(name, value) for name, value in budget.items()}

    def run_test(self, part, test):
        program = os.path.join(part.folder, test['cmd'][0])  # scripts run without the wrapper
        wrap = part.wrap() if program.startswith(part.folder + os.sep) else []
        functions = self.functions(part, test)
        env = {**test['env'], **self.environment(part), **({'UPIPE_TEST': functions} if functions else {})}
        status, said, cpu = self.runner.command([*wrap, *test['cmd']], test['workdir'] or part.folder, env,
                                                test['timeout'] * part.slow)
        if functions and status == 0 and 'chosen: ' not in said:
            return 2, f'{self.key(part, test)} has no functions with names\n{said}', cpu
        return status, said, cpu

    def key(self, part, test):
        return f"{part.name}/{test['name']}"

    def test_jobs(self, part, tests, build):
        made = []
        for test in tests:
            # A limit is ten times what a test takes: of those that never ran, the longest are known by it.
            guess = self.runner.known.get(self.key(part, test), [test['timeout'] / 10 * part.slow])[0]
            after = [build] if test['depends'] else []
            for version in INSTALLED & set(suites(test)):
                if version not in self.installs:
                    self.installs[version] = self.install_job(version)
                    made.append(self.installs[version])
                after.append(self.installs[version])
            job = Job(self.key(part, test), lambda test=test: self.run_test(part, test), guess, after, alone=not test['is_parallel'],
                      cores=PROCESSES if WIDE & set(suites(test)) else 2 if INSTALLED & set(suites(test)) else 1)
            job.test, job.again = test, ':'.join(filter(None, (job.name, self.functions(part, test))))
            self.groups.setdefault(part.name, {}).setdefault(self.suite_of(part, test), []).append(job)
            made.append(job)
        return made

    def install_job(self, version):
        """Beside a build, which leaves a core."""
        words = [sys.executable, os.path.join(TOP, 'tests', 'lib', 'pytorch.py'), version]
        job = Job(f'install torch {version}', lambda: self.runner.command(words, TOP, limit=1800), guess=5e3)
        job.again = version
        return job

    def suite_of(self, part, test):
        chosen = part.full if self.mode != 'ordinary' else part.ordinary
        return next((suite for suite in suites(test) if suite in chosen), suites(test)[0])

    # ---- verdicts ----

    def ended(self, job):
        if job.test is None or job.again == job.name:  # all of it has run
            self.runner.times[job.name] = [round(job.seconds, 1), round(job.cpu, 1)]
        self.cpu += job.cpu
        self.left |= {line for line in job.said.split('\n') if line.startswith('left out:')}
        with open(os.path.join(LOGS, re.sub('[ /]', '-', job.name) + '.log'), 'w', encoding='utf-8') as file:
            file.write(job.said)
        if job.status not in (0, SKIPPED):
            self.failures.append((job.again, sentence_of(job.said, job.status)))
            self.runner.say(f'{job.said}FAILED: {job.name}, status {job.status}, after {job.seconds:.0f} s')
        elif job.test is not None:
            self.passed += job.status == 0
            self.skipped += job.status == SKIPPED
        return self.follow(job)

    def say_part(self, name):
        """What a build's suites have come to, with seconds of processors."""
        words = []
        for suite, jobs in self.groups[name].items():
            tests = [job.status for job in jobs if job.test is not None and job.status is not None]
            count = {'passed': tests.count(0), 'skipped': tests.count(SKIPPED)}
            count['failed'] = len(tests) - sum(count.values())
            said = [f'{number} {what}' for what, number in count.items() if number]
            words.append(f'{suite} {", ".join([*said, f"{sum(job.cpu for job in jobs):.0f} s"])}')
        self.runner.say(f'{name}: {"; ".join(words)}')

    def follow(self, job):
        """After a build's setup it is known what is to be built, and what runs."""
        if job.status != 0 or not job.name.startswith('setup '):
            return []
        here = self.builds[job.name]
        tests = {part.name: self.chosen(part, self.described(part, 'tests')) for part in here}
        every = [test for chosen in tests.values() for test in chosen]
        programs = [program for part in here for program in part.builds]
        build = Job(job.name.replace('setup', 'build'), lambda: self.compile(here[0], every, programs), guess=1e4,
                    cores=CORES)
        build.again = job.again
        self.groups.setdefault(here[0].name, {})['build'] = [build]
        return [build] + [made for part in here for made in self.test_jobs(part, tests[part.name], build)]

    def setup_job(self, part):
        name = f'setup {os.path.basename(part.folder)}'
        self.builds.setdefault(name, []).append(part)
        job = Job(name, lambda: self.setup(part), guess=1e5)
        job.again = ' '.join(':'.join(filter(None, one)) for one in self.only) or os.path.basename(part.folder)
        return job

    def expect(self, here, setups):
        """What a whole run will take, by the last one of this machine or of another: of the builds and parts that are here."""
        jobs = {*setups, *(name.replace('setup', 'build') for name in setups), *(f'install torch {one}' for one in INSTALLED)}
        self.runner.expected = {name: took[1] for name, took in self.runner.known.items()
                                if not self.only and (name in jobs or name.partition('/')[0] in here)}

    def main(self, listing):
        os.makedirs(LOGS, exist_ok=True)
        every = parts()
        first = Part('gcc', every[0].options, full='')
        if self.only or listing:
            # Every build has the same tests, but for a few suites: the first one says where names belong.
            status, said, _ = self.setup(first)
            if status != 0:
                print(said)
                return 1
            known = self.described(first, 'tests')
            there = {name for test in known for name in (test['name'], *suites(test))}
            lacking = {name for part in every for name in part.full} - there
            known += [{'name': name, 'suite': [name]} for name in sorted(lacking)]
            absent = list(self.absent(every, known))
            for name, option in absent:
                print(f'no test of the {self.mode} run is named {name}'
                      + (f': sh tests/run.sh {option}--only {name}' if option else ''), file=sys.stderr)
            if absent:
                return 2
            every = [part for part in every if self.chosen(part, known)]
            if listing:
                for part in every:
                    for test in self.chosen(part, known):
                        took = self.runner.times.get(self.key(part, test))
                        print(f'{self.key(part, test):34} {",".join(suites(test)):34} '
                              + (f'{took[0]:.1f} s, of processors {took[1]:.1f} s' if took else 'not run yet'))
                return 0
        jobs, here = {}, set()
        for part in every:
            if not (part.full if self.mode != 'ordinary' else part.ordinary):
                continue
            if part.needs and not part.needs[0]():
                self.runner.say(f'left out: {part.name}, as {part.needs[1]}')
                continue
            job = self.setup_job(part)
            jobs.setdefault(job.name, job)
            here.add(part.name)
        budget = ', '.join(f'{name} {os.environ.get(name, value)}' for name, value in BUDGETS[self.mode].items())
        self.expect(here, jobs)
        takes = f' takes about {about(self.runner.estimate())} here' if self.runner.expected else ''
        self.runner.say(f'the {self.mode} run{takes}, on {CORES} cores; {budget}')
        try:
            self.runner.go(list(jobs.values()), self.ended)
        except KeyboardInterrupt:
            self.failures.append((' '.join(job.again for job in self.runner.running), 'interrupted'))
        finally:
            self.runner.kill()
            times = {mode: times_of(TIMES, mode) for mode in MODES} | {self.mode: self.runner.times}
            with open(TIMES, 'w', encoding='utf-8') as file:
                file.write(json.dumps(times, sort_keys=True).replace('], ', '],\n') + '\n')  # a line a job
        for name in self.groups:
            self.say_part(name)
        for line in sorted(self.left):
            self.runner.say(line)
        if self.skipped:
            self.runner.say(f'{self.skipped} skipped')
        took = time.time() - self.runner.began
        self.runner.say(f'{self.cpu:.0f} s of processors, all in {took:.0f} s; logs in build/logs')
        option = [] if self.mode == 'ordinary' else [f'--{self.mode}']
        for line in failure_lines(self.failures, option):
            self.runner.say(line)
        self.runner.say(f'{self.passed} passed, {len(self.failures)} failed')
        return 0 if self.passed and not self.failures else 1


def main():
    parser = argparse.ArgumentParser(prog='run.sh')
    parser.add_argument('--full', action='store_true')
    parser.add_argument('--all', action='store_true')
    parser.add_argument('--only', nargs='+', default=[])
    parser.add_argument('--list', action='store_true')
    options = parser.parse_args()
    # the children have groups of their own, which end with this one
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # what hangs leaves no core file
    return Session(options).main(options.list)


if __name__ == '__main__':
    sys.exit(main())
