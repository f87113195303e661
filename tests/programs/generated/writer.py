"""Writes a program at random: a model, its objective, its optimizer, data, and calls of fit and others."""

from __future__ import annotations

import dataclasses
import random
import re

from programs.generated.fitting_pieces import CALLBACKS, OPTIMIZERS, OPTIONS, SCHEDULES
from programs.generated.layer_pieces import FLAT, INPUTS, MERGES, SAME
from programs.generated.objective_pieces import STEP_TARGETS, TARGETS, Target

FORMS = ["sequential", "functional", "functional", "subclass", "nested", "two inputs", "shared", "two outputs", "steps"]
ROWS = [
    "rows(data)",
    "rows(data)",
    "rows(data).filter(lambda *row: True)",  # of unknown number
    "rows(data).shuffle(99, seed=1, reshuffle_each_iteration=False)",
]
BATCHES = {
    "batched": "rows(data).batch({batch})", "uneven": "uneven(data, {batch})", "PyDataset": "Rows(data, {batch})",
    "threads": "Rows(data, {batch}, workers=2)", "generator": "endless(data, {batch})",
}  # fmt: skip
REDUCTIONS = ["reduction='sum'", "reduction='mean'", "reduction='mean_with_sample_weight'", "reduction='none'"]


@dataclasses.dataclass(frozen=True)
class Program:
    """A program as text, which `running` runs."""

    seed: int
    precision: str
    text: str

    def __str__(self):
        return f"# program {self.seed}, {self.precision}\n{self.text}"


def write(seed: int) -> Program:
    """Returns the program of a seed; the same in every process."""
    return _Writer(seed).program()


class _Writer:
    def __init__(self, seed: int):
        self.seed = seed
        self.random = random.Random(seed)
        self.form = self.pick(FORMS)
        self.targets: list[Target] = []
        self.names: list[str] = []
        self.outputs_are_dict = False
        self.weight = self.compiled = self.own = ""

    def pick(self, choices):
        return self.random.choice(choices)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def some(self, choices: list[str], most: int) -> list[str]:
        return self.random.sample(choices, min(len(choices), self.random.randint(0, most)))

    def program(self) -> Program:
        precision = self.random.choices(["float64", "float32", "mixed_bfloat16"], [70, 24, 6])[0]
        n = self.pick([1, 5, 13, 24, 37, 37, 61])
        model, inputs = self.model()
        if n == 1 and "BatchNormalization" in "".join(model):
            n = 3  # a row less its own mean is nothing but rounding, which Lamb makes as long as a weight
        out = [*model, self.compiling()]
        out += [f"n, draw = {n}, Draw({self.seed})", *self.data(inputs), *self.calls(n, model)]
        if re.search(r"L\.Random|L\.A|Histogram|Equalization|Mel|Muon|[tT]op_?[kK]", "".join(out)):
            precision = "float32"  # these fail in float64
        elif "Norm" in "".join(out):
            precision = "float64"  # the gradient of a bias that a norm cancels is rounding, and Adam takes it whole
        return Program(self.seed, precision, "\n".join(out) + "\n")

    # -- the model --

    def model(self) -> tuple[list[str], list[str]]:
        """Returns the lines that make `model`, and the names of its inputs' data in `INPUTS`."""
        if self.form == "steps":
            return self.of_steps()
        self.targets = [TARGETS[self.pick(list(TARGETS))] for _ in range(2 if self.form == "two outputs" else 1)]
        name = self.input_name()
        if self.form in ("sequential", "subclass"):
            return self.of_parts(name)
        if self.form == "two inputs":
            names = [name, self.input_name()]
            lines = [*self.tower("x0", names[0]), "first = h", *self.tower("x1", names[1])]
            lines.append("h = L.Concatenate()([first, h])")
            return [*lines, *self.ending("[x0, x1]")], names
        if self.form == "shared":
            layers = ", ".join([*self.first_layers(name), *self.parts("features", 2)]) or "L.Identity()"
            shape = INPUTS[name][1]
            lines = [f"x0, x1 = keras.Input({shape}), keras.Input({shape})", f"shared = keras.Sequential([{layers}])"]
            lines.append(self.pick(["h = L.Concatenate()([shared(x0), shared(x1)])", "h = shared(x0) - shared(x1)"]))
            return [*lines, *self.ending("[x0, x1]")], [name, name]
        lines = self.tower("x0", name)
        if self.form == "nested":
            lines += ["base = keras.Model(x0, h)", f"x0 = keras.Input({INPUTS[name][1]})", "h = base(x0)"]
            if self.chance(0.3):
                lines.append("base.trainable = False")
        return [*lines, *self.ending("x0")], [name]

    def input_name(self) -> str:
        common = self.chance(0.5)
        return self.pick(["features", "tokens", "sequence", "image"] if common else list(INPUTS))

    def parts(self, kind: str, most: int) -> list[str]:
        return self.some(SAME[kind], most)

    def first_layers(self, name: str) -> list[str]:
        """The layers from an input to features."""
        kind, _, _, first = INPUTS[name]
        layers = [self.pick(first)] if first else []
        if kind != "features":
            layers += [*self.parts(kind, 2), self.pick(FLAT[kind])]
        return layers

    def of_parts(self, name: str) -> tuple[list[str], list[str]]:
        layers = [*self.first_layers(name), *self.parts("features", 3)]
        head = self.targets[0].head
        if self.form == "sequential":
            # Keras' own Normalization, built while it is traced, keeps a tensor of that trace.
            early = "string" in INPUTS[name][1] or any("L.Normalization" in layer for layer in layers)
            start = [f"keras.Input({INPUTS[name][1]})"] if early or self.chance(0.7) else []
            return [f"model = keras.Sequential([{', '.join([*start, *layers, head])}])"], [name]
        layers = [layer for layer in layers if "L.Normalization" not in layer]
        if self.chance(0.4):
            self.targets.append(TARGETS[self.pick(list(TARGETS))])
            self.names, self.outputs_are_dict = ["a", "b"], True
            heads = f"{{'a': {head}, 'b': {self.targets[1].head}}}"
        else:
            heads = f"[{head}]"
        return [f"model = Chain([{', '.join(layers)}], {heads})"], [name]

    def tower(self, x: str, name: str) -> list[str]:
        """Functional lines from an input `x` to features `h`."""
        kind, shape, _, first = INPUTS[name]
        lines = [f"h = {x} = keras.Input({shape}, name={x!r})"]
        if first:
            lines.append(f"h = {self.pick(first)}(h)")
        if kind != "features":
            lines += [*self.applied(kind, 2), f"h = {self.pick(FLAT[kind])}(h)"]
        return [*lines, *self.applied("features", 2)]

    def applied(self, kind: str, most: int) -> list[str]:
        lines = [f"h = {layer}(h)" for layer in self.parts(kind, most)]
        if self.chance(0.3):
            lines.insert(self.random.randint(0, len(lines)), f"h = {self.pick(MERGES[kind])}")
        return lines

    def ending(self, inputs: str) -> list[str]:
        """Lines that end a functional model."""
        if len(self.targets) == 1:
            extra = ["h = Tied()(h)"] if self.chance(0.1) else []
            return [*extra, f"model = {self.kind()}({inputs}, {self.targets[0].head}(h))"]
        self.names, self.outputs_are_dict = ["a", "b"], self.chance(0.4)
        heads = [f"L.Identity(name={n!r})({t.head}(h))" for n, t in zip(self.names, self.targets)]
        outputs = f"{{'a': {heads[0]}, 'b': {heads[1]}}}" if self.outputs_are_dict else f"[{', '.join(heads)}]"
        return [f"model = {self.kind()}({inputs}, {outputs})"]

    def kind(self) -> str:
        """The class of a functional model."""
        self.own = self.pick(["OwnObjective", "LogsMore", "OwnStep", "OwnFit", "OwnFit"]) if self.chance(0.25) else ""
        return self.own or "keras.Model"

    def of_steps(self) -> tuple[list[str], list[str]]:
        """A model with an output for each step of a sequence."""
        self.targets = [STEP_TARGETS[self.pick(list(STEP_TARGETS))]]
        name = self.pick([name for name, (kind, *_) in INPUTS.items() if kind == "sequence"])
        lines = [f"h = x0 = keras.Input({INPUTS[name][1]})"]
        if INPUTS[name][3]:
            lines.append(f"h = {self.pick(INPUTS[name][3])}(h)")
        return [*lines, *self.applied("sequence", 2), *self.ending("x0")], [name]

    # -- the objective --

    def compiling(self) -> str:
        """The line that compiles."""
        options = [f"optimizer={self.optimizer()}", f"loss={self.loss()}"]
        if self.names and self.chance(0.4):
            options.append(f"loss_weights={self.per_output(['0.3', '2.0'])}")
        for kind, share in (("metrics", 0.7), ("weighted_metrics", 0.4)):
            if self.chance(share):
                options.append(f"{kind}={self.metrics()}")
        if self.chance(0.03):
            options.append(self.pick(["jit_compile=False", "auto_scale_loss=False"]))
        if self.chance(0.02):
            options.append("run_eagerly=True")
        elif self.chance(0.08):
            options.append("steps_per_execution=3")
        self.compiled = f"model.compile({', '.join(options)})"
        return self.compiled

    def per_output(self, values: list[str]) -> str:
        if self.outputs_are_dict or self.chance(0.5):
            return f"{{{', '.join(f'{n!r}: {v}' for n, v in zip(self.names, values))}}}"
        return f"[{', '.join(values)}]"

    def options(self, text: str, choices: list[str], share: float) -> str:
        """Fills in {o}."""
        option = self.pick(choices) if self.chance(share) else ""
        return re.sub(r"(, )?\{o\}", lambda at: (at[1] or "") + option if option else "", text)

    def loss(self) -> str:
        usual = REDUCTIONS if self.chance(0.1) else REDUCTIONS[:3]
        losses = [self.options(self.pick(target.losses), usual, 0.35) for target in self.targets]
        if len(losses) == 1:
            return losses[0]
        if self.chance(0.15):
            losses[1] = "None"
        return self.per_output(losses)

    def metrics(self) -> str:
        chosen = [f"[{', '.join(self.some(target.metrics, 3))}]" for target in self.targets]
        return chosen[0] if len(chosen) == 1 else self.per_output(chosen)

    def optimizer(self) -> str:
        # Keras' own ScheduleFreeAdamW ends with other weights in a graph, which OwnStep is, than op by op.
        fitting = [o for o in OPTIMIZERS if not (self.own == "OwnStep" and "ScheduleFree" in o)]
        text = self.options(self.pick(fitting), OPTIONS, 0.45)
        if self.chance(0.15):
            text = re.sub(r"\((1\.0|0\.\d+)", f"({self.pick(SCHEDULES)}", text, count=1)
        return text

    # -- the data and the calls --

    def data(self, inputs: list[str]) -> list[str]:
        drawn = [f"draw.{INPUTS[name][2]}" for name in inputs]
        lines = [f"x = {drawn[0]}"]
        if len(drawn) > 1:
            as_dict = self.form == "two inputs" and self.chance(0.5)
            lines = [f"x = {{'x0': {drawn[0]}, 'x1': {drawn[1]}}}" if as_dict else f"x = ({', '.join(drawn)})"]
        targets = [re.sub(r"\b(normal|classes|yes_or_no)\(", r"draw.\1(", target.data) for target in self.targets]
        if self.form == "steps":
            lines.append("t = model.outputs[0].shape[1] or 6")
        if len(targets) == 1:
            lines.append(f"y = {targets[0]}")
            per_step = self.pick(["draw.weights(n, t)", "draw.weights(n, 1)"])
            of_steps = self.form == "steps" and "CTC" not in self.targets[0].losses[0]
            whole = self.pick(["draw.weights(n)", "draw.weights(n)", "draw.weights(n, 1)"])
            self.weight = self.pick(["None", "None", per_step if of_steps else whole])
        else:
            as_dict = self.outputs_are_dict or self.chance(0.5)
            wrap = (lambda a, b: f"{{'a': {a}, 'b': {b}}}") if as_dict else (lambda a, b: f"({a}, {b})")
            lines.append(f"y = {wrap(*targets)}")
            # A dict of weights fits a dict of outputs alone: Keras looks them up by place.
            wrap = wrap if self.outputs_are_dict else (lambda a, b: f"({a}, {b})")
            each = wrap("draw.weights(n)", "draw.weights(n)")
            self.weight = self.pick(["None", "None", each, "draw.weights(n)"])
        lines += [f"w = {self.weight}", "data = (x, y) if w is None else (x, y, w)", "notes = api.notes"]
        return lines

    def calls(self, n: int, model: list[str]) -> list[str]:
        batch = self.pick([1, 4, 5, 7, 8, 16, 64]) if n <= 24 else self.pick([5, 7, 8, 16, 24, 64])
        lines = [self.on_batch() if self.chance(0.08) else self.fit(n, batch, model)]
        lines += [look(batch) for look in (self.evaluate, self.predict) if self.chance(0.5)]
        actions = ["fit", "recompile", "save", "freeze", "rate", "weights", "on_batch", "on_batch"]
        for action in self.some(actions, 2):
            lines += [*self.further(action, model), self.fit(n, batch, model)]
            if action == "weights":
                lines += ["model.load_weights(folder / 'a.weights.h5')", self.evaluate(batch)]
        return lines

    def further(self, action: str, model: list[str]) -> list[str]:
        """Lines of something that is done between two trainings."""
        match action:
            case "recompile":
                return [self.compiling()]
            case "freeze":
                layer = f"model.layers[{self.pick([0, 1, -1])} % len(model.layers)]"
                again = self.compiled if self.chance(0.5) else self.compiling()
                return [f"{layer}.trainable = not {layer}.trainable", again]
            case "save" if not any("Chain(" in line or "Lambda(" in line for line in model):
                return ["model.save(folder / 'model.keras')", "model = keras.models.load_model(folder / 'model.keras')"]
            case "weights":
                return ["model.save_weights(folder / 'a.weights.h5')"]
            case "rate":
                return [f"api.set_rate(model, 0.02, assign={self.chance(0.5)})"]
            case "on_batch":
                return [self.on_batch()]
        return []

    def on_batch(self) -> str:
        # Keras takes one weight for several outputs in fit alone.
        weight = "None" if self.weight == "draw.weights(n)" and len(self.targets) > 1 else "w"
        return f"api.on_batch(model, x, y, {weight}, {self.pick([(4,), (4, 4), (7, 3, 7), (3, 5), (5, 3, 4, 5)])})"

    def fit(self, n: int, batch: int, model: list[str]) -> str:
        kinds = ["arrays"] * 4 + ["tensors", "tf.data", *BATCHES, *["once"] * (self.own != "OwnFit")]
        kind = self.pick(kinds)
        first, epochs = int(self.chance(0.1)), self.pick([1, 2, 2, 3])
        options = [f"epochs={first + epochs}", "shuffle=False"]
        if first:
            options.append("initial_epoch=1")
        steps = -(-n // batch)
        classes = self.chance(0.3) and len(self.targets) == 1 and "classes(n)" in self.targets[0].data
        if classes and self.weight == "None" and kind not in ("generator", "once"):
            options.append("class_weight={0: 3.0, 2: 0.2, 4: 1.5}")
        if kind in ("arrays", "tensors"):
            given = "x, y" if kind == "arrays" else "tensors(x), tensors(y)"
            given += f", batch_size={batch}"
            if self.weight != "None":
                given += ", sample_weight=w"
            if self.chance(0.1) and not first:  # which says for tfdist where in the data to begin
                # Others end within an epoch, which Keras cuts short and tfdist, with a warning, does not.
                options.append(f"steps_per_epoch={self.pick([n for n in range(1, steps + 1) if steps % n == 0])}")
        elif kind == "tf.data":
            given = f"{self.pick(ROWS)}.batch({batch})"
            if self.chance(0.4):
                given += ".repeat()"
                options.append(f"steps_per_epoch={self.random.randint(1, steps + 2)}")
            elif self.chance(0.2) and "filter" not in given:  # whose end is unknown
                options.append(f"steps_per_epoch={steps}")
        else:
            given = BATCHES[kind].format(batch=batch) if kind in BATCHES else f"once(data, {batch})"
            if kind == "generator":
                options.append(f"steps_per_epoch={steps}")
            elif kind == "once":
                epochs, options[0] = 1, f"epochs={first + 1}"
        if n >= 5 and self.chance(0.5):
            validation = self.validation(kind, epochs)
            divides = "steps_per_epoch" in str(options) and "validation_split" in str(validation)
            options += [] if divides else validation
        chosen = [c for c in self.some(CALLBACKS, 2) if self.suits(c, options, model)]
        if chosen:
            options.append(f"callbacks=[{', '.join(chosen)}]")
        return f"api.fit(model, {given}, {', '.join(options)})"

    def validation(self, kind: str, epochs: int) -> list[str]:
        if kind in ("arrays", "tensors") and self.chance(0.3):
            return ["validation_split=0.3"]
        form = self.pick(["arrays", "arrays", *BATCHES])
        if form == "generator" and epochs > 1:
            form = "batched"  # Keras repeats two of its batches, and goes on with whatever was not read ahead
        options = [f"validation_data={BATCHES[form].format(batch=3) if form in BATCHES else 'data'}"]
        options[0] = (
            options[0].replace("data)", "part(data))").replace("data,", "part(data),").replace("=data", "=part(data)")
        )
        if form == "generator":
            options.append("validation_steps=2")
        if self.chance(0.3):
            options.append(self.pick(["validation_freq=2", "validation_freq=[1, 3]"]))
        if self.chance(0.3) and kind == form == "arrays":
            options.append("validation_batch_size=3")
        return options

    def suits(self, callback: str, options: list[str], model: list[str]) -> bool:
        """Whether Keras takes a callback beside these options."""
        if "val_" in callback:
            return "validation_" in str(options) and "validation_freq" not in str(options)
        if "EMA" in callback:
            return "use_ema" in self.compiled and "overwrite" not in self.compiled
        if "MultiOptimizer" in self.compiled and "Notes" in callback:
            return False  # has no learning rate
        if re.search("LearningRate|ReduceLR|Rates", callback):
            by_batch = "|steps_per_execution" * ("Rates" in callback)  # which says how often it is called
            return not re.search("schedules|MultiOptimizer" + by_batch, self.compiled)
        if ".keras" in callback and any("Chain(" in line or "Lambda(" in line for line in model):
            return False
        if "Batch" in callback or "batch" in callback:
            return "steps_per_execution" not in self.compiled
        return "Backup" not in callback or "keras.Input(" in model[0]

    def evaluate(self, batch: int) -> str:
        weights = ", sample_weight=w" if self.weight != "None" else ""
        given = self.pick([f"x, y, batch_size={batch}{weights}", *(b.format(batch=batch) for b in BATCHES.values())])
        return f"api.evaluate(model, {given}{', steps=2' if 'endless' in given else ''})"

    def predict(self, batch: int) -> str:
        given = self.pick([f"x, batch_size={batch}", *(b.format(batch=batch) for b in BATCHES.values())])
        return f"api.predict(model, {given.replace('data', '(x,)')}{', steps=2' if 'endless' in given else ''})"
