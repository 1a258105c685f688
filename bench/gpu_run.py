"""gpu_run.py -- what the stages of gpu.py share: commands that end in time, lines of output, figures and their files

    run = Run(options, folder_of_programs)
    with run.stage('roofline', 30):                     what runs inside ends within 30 s
        keep(run, 'roofline', [['roofline']])           one figure a command, in gpu_roofline.json

Every command runs in a session of its own, which is killed whole when the command ends or has no time left: a process that
hangs on the device would stay there beside all later figures.
"""

import concurrent.futures
import contextlib
import datetime
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILD = os.path.join(TOP, 'build', 'gpu')
DEVICE_LIST = os.path.join(TOP, 'tests', 'cuda', 'device_tests.txt')
COMMAND = 20  # seconds of a command that measures, if nobody says more
LATE = 5  # seconds that a killed process may take to end
SHOWN = 20  # lines of a failed command's output that the log repeats to the terminal
CONTESTANTS = ['upipe', 'upipe_80', 'cudnn', 'cudnn_deterministic']


class Failed(Exception):
    """A stage cannot go on; the sentence says why."""


class Lost(Failed):
    """The device does not answer any more: no stage can go on."""


class Done:
    """How a command ended: status None means that it ran out of time."""

    def __init__(self, status, out, err, seconds):
        self.status, self.out, self.err, self.seconds = status, out, err, seconds

    def reason(self):
        """The last line that says why, of a command that failed."""
        if self.status is None:
            return f'no result within {self.seconds:.0f} s'
        lines = [line for line in (self.err.strip() or self.out.strip()).splitlines() if line.strip()]
        return lines[-1] if lines else f'exit status {self.status}'


RUNNING = set()  # what launch has started, and waits for


def kill_session(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def end_all(number, _frame):
    """At a signal: nothing that was started stays, though its sessions are not the script's."""
    for process in list(RUNNING):
        kill_session(process)
    os._exit(128 + number)


def launch(command, seconds=None, env=None, stdin=''):
    """Runs a command to its end, or for so many seconds. OSError: it does not start."""
    start = time.monotonic()
    with tempfile.TemporaryFile('w+', errors='replace') as out, tempfile.TemporaryFile('w+', errors='replace') as err, \
            tempfile.TemporaryFile('w+') as given:
        given.write(stdin)
        given.seek(0)
        # pylint: disable=consider-using-with
        process = subprocess.Popen(command, cwd=TOP, env=env, stdin=given, stdout=out, stderr=err, start_new_session=True)
        RUNNING.add(process)
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            kill_session(process)
            RUNNING.discard(process)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it: then it is left behind
                process.wait(timeout=LATE)
        out.seek(0)
        err.seek(0)
        return Done(status, out.read(), err.read(), time.monotonic() - start)


def libraries():
    """The environment in which programs find NVIDIA's libraries where only Python packages have them."""
    folders = [folder for place in sys.path for folder in sorted(glob.glob(os.path.join(place, 'nvidia', '*', 'lib')))]
    path = ':'.join([*filter(None, [os.environ.get('LD_LIBRARY_PATH')]), *folders])
    return {**os.environ, 'LD_LIBRARY_PATH': path} if path else dict(os.environ)


class Run:
    """Options, clocks, programs and output of one call of gpu.py."""

    def __init__(self, options, programs):
        self.options, self.programs = options, programs
        self.results = options.results
        self.logs = os.path.join(options.results if options.brief or options.objects else BUILD, 'logs')
        self.ends = {'run': float('inf'), 'stage': float('inf')}
        self.began = time.monotonic()
        self.avoid = {}  # head dim of a kernel -> set of 'fwd90', 'bwd90'
        self.lines_left = options.lines
        self.env = libraries()
        os.makedirs(self.logs, exist_ok=True)

    # ---- output ----

    def log(self, text):
        """A line for who reads the log; for the terminal too, but in a run whose output is short."""
        with open(os.path.join(self.logs, 'gpu.log'), 'a', encoding='utf-8') as out:
            out.write(f'{time.monotonic() - self.began:6.1f} {text}\n')
        if self.lines_left is None:
            print(f'gpu.py: {text}', file=sys.stderr, flush=True)

    def report(self, text):
        """A line for the terminal, while there are any left."""
        if self.lines_left is not None:
            if self.lines_left == 0:
                return self.log(text)
            self.lines_left -= 1
            print(text[:400], file=sys.stderr, flush=True)
        return self.log(text)

    # ---- time ----

    def left(self, most=float('inf')):
        """Seconds that a command may run, at most `most`; None: any."""
        end = min(self.ends.values())
        seconds = min(most, max(0.0, end - time.monotonic()))
        return None if seconds == float('inf') else seconds

    @contextlib.contextmanager
    def stage(self, name, seconds):
        self.ends['stage'] = float('inf') if seconds is None else time.monotonic() + seconds
        start = time.monotonic()
        try:
            yield
        finally:
            self.ends['stage'] = float('inf')
            self.report(f'{name}: {time.monotonic() - start:.0f} s')

    # ---- commands ----

    def path(self, name):
        if name == 'gpu' and self.options.program:
            return self.options.program
        return os.path.join(self.programs, name)

    def has(self, name):
        return os.path.exists(self.path(name))

    def launch(self, command, most=float('inf'), env=None, stdin=''):
        """A command within the stage's time; what it prints goes to the log."""
        seconds = None if self.options.quick and most != float('inf') else self.left(most)
        if seconds == 0:
            return Done(None, '', '', 0)
        done = launch(command, seconds, {**self.env, **(env or {})}, stdin)
        self.log(f'$ {" ".join(command)}\n  {"out of time" if done.status is None else f"status {done.status}"}, '
                 f'{done.seconds:.1f} s')
        return done

    def call(self, name, command, most=float('inf'), env=None):
        """The exit status of a command whose output is kept as NAME.log; None: there was no time."""
        done = self.launch(command, most, env)
        path = os.path.join(self.logs, f'{name}.log')
        with open(path, 'w', encoding='utf-8') as out:
            out.write(done.out + done.err)
        if done.status != 0:
            short = 'out of time' if done.status is None else f'status {done.status}: {done.reason()}'
            self.report(f'{name}: {short}')
            if self.lines_left is None:
                self.log('\n'.join([f'the end of {path}:', *(done.out + done.err).splitlines()[-SHOWN:]]))
        return done.status

    def side_by_side(self, work, items, width):
        """work(item) of every item, so many at a time."""
        with concurrent.futures.ThreadPoolExecutor(max(1, min(width, os.cpu_count() or 1))) as pool:
            return list(pool.map(work, items))

    def ask_driver(self, what):
        """What nvidia-smi says of the first device; None without it."""
        if not shutil.which('nvidia-smi'):
            return None
        done = launch(['nvidia-smi', f'--query-gpu={what}', '--format=csv,noheader'], COMMAND)
        return done.out.split('\n')[0].strip() if done.status == 0 else None


# ---- figures ----

def number(run, command, program='gpu', most=COMMAND):
    """The JSON object that a command prints, with the command in it; with `failed` or `refused` if there is none."""
    words = {'command': ' '.join([program, *command])}
    try:
        done = run.launch([run.path(program), *command], most)
    except OSError as error:
        raise Failed(f'{run.path(program)}: {error.strerror}; run the stage build, or unpack') from error
    if done.status == 0:
        return {**words, **json.loads(done.out)}
    run.report(f'{words["command"]}: {done.reason()}')
    if done.status != 3 and command != ['device'] and 'failed' in number(run, ['device']):
        raise Lost(f'after {words["command"]} the device does not answer any more')
    return {**words, 'refused' if done.status == 3 else 'failed': done.reason()}


def failures(figures):
    """What each figure that failed says, and each contestant of one."""
    for figure in figures:
        if 'failed' in figure:
            yield f'{figure["command"]} ({figure["failed"]})'
        for kernel in figure.get('kernels', []):
            if 'failed' in kernel:
                yield f'{kernel["name"]} of {figure["command"]} ({kernel["failed"]})'


def command_words(options, stage):
    """The flags that a figure of this stage comes from."""
    if not options.brief:
        return ['--stage', stage]
    return ['--brief', *['--second'] * options.second, *(word for name in options.stage or [] for word in ('--stage', name))]


def keep(run, stage, cases, measure=number, show=lambda figure: None):
    """Measures the cases, each a command, and writes the stage's file, beside an earlier one until the last figure is there.

    Where figures failed, ends the stage.
    """
    good, beside = (os.path.join(run.results, f'gpu_{stage}{end}') for end in ('.json', '.failed.json'))
    whole = {'stage': stage, 'date': datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d'),
             'command': ' '.join(['python3 bench/gpu.py', *command_words(run.options, stage)]),
             'device': number(run, ['device']),
             'driver': run.ask_driver('driver_version,clocks.max.sm,power.limit'), 'figures': []}
    had = {}
    if run.options.resume and os.path.exists(beside):
        with open(beside, encoding='utf-8') as source:
            last = json.load(source)
        if last['device'] == whole['device']:
            had = {figure['command']: figure for figure in last['figures'] if not list(failures([figure]))}
        run.log(f'{stage}: {len(had)} figures are there')

    def write(path):
        os.makedirs(run.results, exist_ok=True)
        with open(path, 'w', encoding='utf-8') as out:
            json.dump(whole, out, indent=1)
            out.write('\n')

    lost = None
    for command in cases:
        try:
            figure = had.get('gpu ' + ' '.join(command)) or measure(run, command)
        except Lost as loss:
            lost, figure = loss, {'command': 'gpu ' + ' '.join(command), 'failed': str(loss)}
        whole['figures'].append(figure)
        show(figure)
        write(beside)
        if lost:
            raise lost
    bad = list(failures([whole['device'], *whole['figures']]))
    write(beside if bad else good)
    run.log(f'wrote {beside if bad else good}')
    if bad:
        raise Failed(f'no figure from: {"; ".join(bad)}')
    os.remove(beside)
