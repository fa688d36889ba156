"""Write paper.md: where each algorithm, equation, figure, table and claim of the paper is in the code.

python docs/paper_map.py

Each ``Row`` in ``SECTIONS`` is one part of the paper. Its tags select the classes and functions that implement this
part, by name or by text in the ``Paper:`` lines of their docstrings. The row also lists the tests and commands of the
part. tests/test_docs.py checks that the code, tests and commands exist, and that the page is up to date.
"""

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "batchnorm"
PAGE = ROOT / "docs" / "paper.md"


class Row(NamedTuple):
    """One part of the paper: what it says, its tests and commands, and the tags that select its code."""

    says: str
    tags: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    note: str = ""  # why there is no code, if there is none


FIG2 = "reproduce fig2"
TABLES = "reproduce/test_fig2_tables.py"
CLAIMS = "reproduce/test_claims.py"

SECTIONS: dict[str, list[Row]] = {
    "Abstract": [
        Row(
            "Higher learning rates",
            ("reproduce.imagenet.claims.wider_range",),
            (f"{TABLES}::test_the_range_of_rates",),
            (FIG2,),
        ),
        Row(
            '"Be less careful about initialization"',
            ('Abstract, "be less careful about initialization"',),
            (f"{CLAIMS}::test_init_small_weights_leave_the_plain_network_on_its_plateau",),
            ("reproduce init",),
        ),
        Row("A regularizer that can replace Dropout", ("=Sec. 3.4",), (f"{TABLES}::test_less_dropout",), (FIG2,)),
        Row("The same accuracy in 14 times fewer steps", ("14 times fewer",), (f"{TABLES}::test_figure3",), (FIG2,)),
        Row(
            "An ensemble with 4.9% top-5 error",
            ("Fig. 4",),
            ("reproduce/test_fig4.py::test_verdicts",),
            ("reproduce fig4",),
        ),
    ],
    "1. Introduction": [
        Row(
            r"SGD: $\Theta = \arg\min_\Theta \frac{1}{N}\sum_i \ell(x_i, \Theta)$ and its gradient over a mini-batch",
            ("Sec. 3.1; Sec. 4.1",),
            ("reproduce/test_training.py::test_it_is_gradient_descent_through_the_layer_on_the_stated_order",),
        ),
        Row(
            r"Sub-networks: $\ell = F_2(F_1(u, \Theta_1), \Theta_2)$; a step of $\Theta_1$ changes the input of $F_2$",
            ("Sec. 2, internal covariate shift",),
            ("monitor/test_shift.py::test_gradient_change_is_section_2_by_hand",),
        ),
        Row(
            "Sigmoids get stuck in the saturated regime",
            ("Sec. 1,",),
            (f"{CLAIMS}::test_saturation_starts_at_the_gaussian_tail_with_bn_and_everywhere_without",),
            ("reproduce saturation",),
        ),
    ],
    "2. Towards reducing internal covariate shift": [
        Row(
            "Internal covariate shift: the change in the distribution of activations",
            ('Sec. 2, "the change', "Sec. 2, internal covariate shift"),
            ("monitor/test_shift.py::test_drift_is_the_formula_and_ignores_scale",),
            ("reproduce fig1",),
        ),
        Row(
            r"$\hat x = x - E[x]$ with $x = u + b$: if the step ignores that $E[x]$ depends on $b$, $b$ grows forever",
            ("=Sec. 2", "ignores the dependence"),
            (f"{CLAIMS}::test_section2_b_grows_without_end_while_the_loss_stays",),
            ("reproduce section2",),
        ),
        Row(
            r"The gradient needs both Jacobians of $\mathrm{Norm}(x, \mathcal{X})$",
            ("Sec. 3, gradients",),
            ("ops/test_reference.py::test_the_six_equations_are_the_derivatives",),
        ),
        Row(r"Whitening, $\mathrm{Cov}[x]^{-1/2}(x - E[x])$", note="not implemented: the paper rejects it"),
    ],
    "3. Normalization via mini-batch statistics": [
        Row(
            r"$\hat x^{(k)} = (x^{(k)} - E[x^{(k)}]) / \sqrt{\mathrm{Var}[x^{(k)}]}$, for each feature separately",
            ("Alg. 1, l. 1-2",),
            ("ops/test_reference.py::test_algorithm_1_by_hand",),
        ),
        Row(
            r"$y = \gamma \hat x + \beta$ can be the identity: $\gamma = \sqrt{\mathrm{Var}[x]}$, $\beta = E[x]$",
            ("Sec. 3 (identity)",),
            (
                "paper/test_sec_3_identity.py::test_identity_transform",
                "surgery/test_insert.py::test_identity_computes_what_the_network_computed",
            ),
        ),
        Row(
            "**Algorithm 1**",
            ("Alg. 1",),
            ("ops/test_reference.py::test_algorithm_1_by_hand", "ops/test_batch_norm.py::test_hard_case"),
            ("bench cpu", "bench kernels"),
        ),
        Row(
            r"$\sum \hat x_i = 0$ and $\frac{1}{m}\sum \hat x_i^2 = 1$",
            ("layers.batch_norm.BatchNorm1d", "ops.reference.batch_norm"),
            ("paper/test_sec_3_identity.py::test_normalized_values_have_mean_0_and_variance_1",),
        ),
        Row(
            "The six gradients",
            ("Sec. 3, gradients",),
            (
                "ops/test_reference.py::test_gradients_by_hand",
                "ops/test_reference.py::test_gradcheck_and_gradgradcheck",
            ),
        ),
    ],
    "3.1. Training and inference": [
        Row(
            "**Algorithm 2, lines 1-5**: insert BN",
            ("Alg. 2, l. 1-5", "subset of activations"),
            ("surgery/test_insert.py::test_training_it_equals_training_the_published_form_step_by_step",),
        ),
        Row(
            "**Algorithm 2, line 6**: train with any variant of SGD",
            ("Sec. 3.1; Sec. 4.1", "Sec. 4.2.2; Alg. 2, l. 7-11", "reproduce.mnist.optimizers.Optimizers"),
            (f"{CLAIMS}::test_every_optimizer_trains_with_bn",),
            ("train", "reproduce optimizers"),
        ),
        Row(
            "A mini-batch has $m > 1$ examples",
            ("layers.batch_norm.BatchNorm1d",),
            ("known_problems/test_single_example.py::test_error_names_the_layer_and_the_ways_out",),
        ),
        Row(
            r"**Algorithm 2, lines 7-10**: $E[x] = E_B[\mu_B]$, $\mathrm{Var}[x] = \frac{m}{m-1} E_B[\sigma_B^2]$",
            ("Alg. 2, l. 8-10", "=Alg. 2, l. 10", "Alg. 2, l. 7-1"),
            ("test_population.py::test_the_papers_rule_for_equal_batches_is_its_formula",),
            ("bench algorithm2",),
        ),
        Row(
            "Moving averages, to track the accuracy during training",
            ("moving averages",),
            (
                "ops/test_running.py::test_equals_torch",
                "paper/test_sec_3_1_inference.py::test_stored_variance_is_unbiased",
            ),
        ),
        Row(
            r"**Algorithm 2, line 11**: $y = \frac{\gamma}{\sqrt{\mathrm{Var}[x] + \epsilon}} x + (\beta - "
            r"\frac{\gamma E[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}})$",
            ("Alg. 2, l. 11",),
            (
                "paper/test_sec_3_1_inference.py::test_inference_is_one_linear_transform_per_activation",
                "inference/test_fold.py::test_fold_equals_eval",
            ),
            ("fold", "bench algorithm2"),
        ),
    ],
    "3.2. Convolutional networks": [
        Row(
            r"$z = g(Wu + b)$ becomes $z = g(\mathrm{BN}(Wu))$; the bias is dropped",
            ("z = g(BN(Wu))", "z = g(Wu + b)", "l. 1-5; Sec. 3.2", "Sec. 3.2 (bias)"),
            (
                "paper/test_sec_3_2_convolution.py::test_a_bias_before_bn_is_canceled",
                "known_problems/test_conventions.py::test_insert_leaves_no_dead_bias",
            ),
        ),
        Row(
            r"Feature maps: $m' = m \cdot p\,q$, one $\gamma$ and $\beta$ for each map",
            ("Sec. 3.2 (convolutional)", "Sec. 3.2; Sec. 4.2.3", "layers.batch_norm.BatchNorm3d"),
            (
                "paper/test_sec_3_2_convolution.py::test_a_feature_map_is_a_fully_connected_batch_of_all_its_locations",
                "paper/test_sec_3_2_convolution.py::test_convolutional_property",
            ),
        ),
        Row(
            r'$Wu + b$ is "more Gaussian" than $u$: normalize before the nonlinearity',
            ('Sec. 3.2, "',),
            (f"{CLAIMS}::test_relu_outputs_are_sparser_and_more_skewed_than_their_inputs",),
            ("reproduce placement",),
        ),
    ],
    "3.3. Higher learning rates": [
        Row(
            r"$\mathrm{BN}(Wu) = \mathrm{BN}((aW)u)$",
            ("reproduce.mnist.scale.Scale",),
            (
                "paper/test_sec_3_3_scale.py::test_scale_of_the_weights_does_not_matter",
                "paper/test_sec_3_3_scale.py::test_with_eps_within_its_bound",
            ),
            ("reproduce scale",),
        ),
        Row(
            r"$\partial\,\mathrm{BN}((aW)u) / \partial u$ does not depend on $a$; "
            r"$\partial\,\mathrm{BN}((aW)u) / \partial (aW)$ falls as $1/a$",
            ("reproduce.mnist.scale.Scale",),
            ("paper/test_sec_3_3_scale.py::test_jacobians",),
            ("reproduce scale",),
        ),
        Row(
            "Larger weights get smaller gradients and stop growing",
            ("reproduce.mnist.scale.Scale",),
            ("paper/test_sec_3_3_scale.py::test_larger_weights_get_smaller_gradients_and_stop_growing",),
            ("reproduce scale",),
        ),
        Row(
            r"Conjecture: the singular values of the layer Jacobian $\hat z = F(\hat x)$ are close to 1",
            ("Sec. 3.3, layer", "Sec. 3.3, z_hat", "l. 10; Sec. 3.3"),
            (f"{CLAIMS}::test_the_jacobian_is_autograds",),
            ("reproduce jacobian",),
        ),
    ],
    "3.4. Regularization": [
        Row(
            "In training, an example's output depends on the other examples of its mini-batch",
            ("layers.batch_norm.BatchNorm1d", "ops.reference.batch_norm"),
            (
                "paper/test_sec_3_4_companions.py::test_training_output_depends_on_companions_less_and_less_with_m",
                "paper/test_sec_3_4_companions.py::test_evaluation_output_depends_on_itself_alone",
            ),
        ),
        Row("Dropout can be removed or reduced", ("=Sec. 3.4",), (f"{TABLES}::test_dropout",), (FIG2,)),
    ],
    "4.1. Activations over time": [
        Row(
            "The MNIST network",
            (
                "data.digits.Digits",
                "data.digits.MNIST",
                "data.digits.mnist",
                "models.perceptron.perceptron",
                "reproduce.mnist.training.Setting",
                "Sec. 4.1; Alg. 2",
            ),
            ("models/test_perceptron.py::test_it_is_the_network_of_section_4_1",),
            ("reproduce fig1",),
        ),
        Row(
            "**Figure 1 (a)**: BN trains faster and ends with a higher accuracy",
            ("Fig. 1 a", "=Fig. 1"),
            ("reproduce/test_fig1.py::test_batch_normalization_trains_faster_at_an_equal_rate",),
            ("reproduce fig1", "reproduce comparison"),
        ),
        Row(
            "**Figure 1 (b, c)**: percentiles of a typical sigmoid's input",
            ("Fig. 1 b, c",),
            (
                "monitor/test_percentiles.py::test_percentiles_equal_torch_quantile",
                "monitor/test_shift.py::test_the_typical_unit_is_the_median",
            ),
            ("reproduce fig1",),
        ),
    ],
    "4.2. ImageNet classification": [
        Row(
            "The network, SGD with momentum, mini-batches of 32, top-1 validation accuracy",
            ("Sec. 4.2, ", "=Sec. 4.2", "Sec. 4.2 (", "Appendix; Sec. 4.2"),
            ("train/test_recipe.py::test_the_table", "evaluate/test_accuracy.py::test_score_against_a_loop"),
            ("train", "describe"),
        ),
        Row(
            "4.2.1: the seven modifications",
            ("Sec. 4.2.1,", "train.recipe.Recipe"),
            (
                "reproduce/test_fig2.py::test_the_ablation_takes_back_one_modification_each",
                f"{TABLES}::test_ablation",
                "train/test_recipe.py::test_six_times_faster_decay",
            ),
            (FIG2,),
        ),
        Row(
            "4.2.1: shuffle more thoroughly",
            ('"Shuffle',),
            ("data/test_order.py::test_fixed_order_lets_the_same_examples_meet_and_a_new_one_does_not",),
        ),
        Row(
            "4.2.1: reduce the photometric distortions",
            ('"Reduce the photometric',),
            ("data/test_augment.py::test_reduced_distorts_less_than_full",),
        ),
        Row(
            "4.2.1: remove local response normalization",
            ('"Remove Local',),
            ("models/test_inception.py::test_local_response_normalization_as_a_convolution",),
        ),
        Row(
            "**Figure 2**: accuracy against steps",
            ("Fig. 2", "Figs. 2", "reproduce.imagenet.claims.verdicts"),
            ("reproduce/test_fig2.py::test_what_a_session_publishes",),
            (FIG2, "compare"),
        ),
        Row(
            "**Figure 3**: steps to Inception's best accuracy, and maximum accuracy",
            ("Fig. 3",),
            (f"{TABLES}::test_figure3",),
            (FIG2,),
        ),
        Row(
            "4.2.2: BN-Baseline needs less than half of Inception's steps",
            ("reproduce.imagenet.claims.fewer_steps",),
            (f"{TABLES}::test_half_the_steps",),
            (FIG2,),
        ),
        Row(
            "4.2.2: BN-x5 needs 14 times fewer steps than Inception",
            ("14 times fewer", "reproduce.imagenet.claims.fewer_steps"),
            (f"{TABLES}::test_a_fourteenth_of_the_steps",),
            (FIG2,),
        ),
        Row(
            "4.2.2: BN-x30 is slower than BN-x5 at first",
            ("slower initially",),
            (f"{TABLES}::test_bn_x30_early",),
            (FIG2,),
        ),
        Row(
            "4.2.2: BN-x30 ends with a higher accuracy than BN-x5",
            ("higher final accuracy",),
            (f"{TABLES}::test_bn_x30_in_the_end",),
            (FIG2,),
        ),
        Row("4.2.2: BN-x5-Sigmoid trains", ("BN-x5-Sigmoid",), (f"{TABLES}::test_the_sigmoid_with_bn",), (FIG2,)),
        Row(
            "4.2.2: Inception with sigmoid stays at chance accuracy",
            ("1/1000", "reproduce.imagenet.fig2_tables.failures"),
            (f"{TABLES}::test_the_sigmoid_without_bn",),
            (FIG2,),
        ),
        Row(
            "4.2.2: Inception at 5 times the learning rate diverges",
            ("machine infinity", "reproduce.imagenet.fig2_tables.failures"),
            (f"{TABLES}::test_the_high_rate_without_bn",),
            (FIG2,),
        ),
        Row(
            "4.2.3: six networks with larger initial weights, dropout or BN per activation",
            ("Sec. 4.2.3 (per activation", "reproduce.imagenet.fig4.Fig4"),
            (
                "reproduce/test_fig4.py::test_the_committed_plan_is_the_six_members_for_as_long_as_the_ablation",
                "layers/test_batch_norm.py::test_per_activation_is_fully_connected_on_the_flattened_input",
            ),
            ("reproduce fig4",),
        ),
        Row(
            "4.2.3: 144 crops, the arithmetic average of class probabilities",
            ("multicrop", "arithmetic average", "=Sec. 4.2.3"),
            (
                "evaluate/test_ensemble.py::test_the_mean_over_crops",
                "evaluate/test_ensemble.py::test_the_mean_over_networks",
            ),
            ("evaluate",),
        ),
        Row(
            "**Figure 4**: errors with one network, with many crops and with many networks",
            ("Fig. 4",),
            ("reproduce/test_fig4.py::test_verdicts",),
            ("reproduce fig4", "evaluate"),
        ),
    ],
    "5. Conclusion": [
        Row(
            "BN adds two parameters per activation",
            ("layers.batch_norm.BatchNorm1d", "ops.reference.batch_norm"),
            ("paper/test_sec_3_identity.py::test_two_parameters_per_activation",),
        ),
        Row(
            "The standardization layer of Gulcehre & Bengio normalizes after the nonlinearity",
            ("Sec. 5, the standardization layer",),
            ("surgery/test_insert.py::test_placement_after_the_nonlinearity",),
            ("reproduce placement",),
        ),
        Row(
            'Domain adaptation, "perhaps with just a recomputation of the population means and variances"',
            ("Sec. 5, domain adaptation",),
            ("paper/test_sec_5_domain_adaptation.py::test_new_statistics_restore_the_accuracy",),
        ),
    ],
    "Appendix": [
        Row(
            "**Figure 5**: the table of the network's layers",
            ("Appendix",),
            (
                "models/test_inception.py::test_rows_are_the_printed_ones",
                "models/test_inception.py::test_outputs_are_the_printed_ones_with_projection_96",
            ),
            ("describe",),
        ),
        Row(
            "Parameters and multiply-adds compared with GoogLeNet",
            ("Appendix; Sec. 4.2",),
            ("models/test_description.py::test_ratios_to_googlenet",),
            ("describe",),
        ),
    ],
}


def tagged() -> dict[str, str]:
    """Return the ``Paper:`` lines of public classes and functions, by their names without ``batchnorm.``."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                for line in re.findall(r"^Paper: (.*)$", ast.get_docstring(node) or "", re.MULTILINE):
                    found[f"{module}.{node.name}"] = line
    return found


def belongs(tag: str, name: str, line: str) -> bool:
    """Return whether a tag selects a class or function, given its name and its ``Paper:`` line.

    A tag selects a class or function if the tag equals the name or occurs in the line. For a tag that starts with "=",
    the text after "=" must equal one of the references in the line, which are separated by "; ".
    """
    return tag[1:] in line.split("; ") if tag.startswith("=") else tag in line or tag == name


def symbols(row: Row) -> list[str]:
    """Return the names of the classes and functions that a row's tags select."""
    return [name for name, line in TAGGED.items() if any(belongs(tag, name, line) for tag in row.tags)]


def page() -> str:
    """Return the text of paper.md."""
    lines = [
        "# Map of the paper",
        "",
        "This page shows where each algorithm, equation, figure, table and claim of the paper is in the code, which",
        "tests check it, and which commands run it. The names of classes and functions are relative to the package",
        "`batchnorm`, and the paths of tests are relative to `tests/`. [Results](results.md) shows what was measured.",
        "",
        "`python docs/paper_map.py` writes this page from its own table and from the `Paper:` lines of docstrings.",
        "",
    ]
    for section, rows in SECTIONS.items():
        lines += [f"## {section}", ""]
        for row in rows:
            parts = {"code": symbols(row), "tests": row.tests, "command": [f"batchnorm {c}" for c in row.commands]}
            lines += [f"- {row.says}", f"    - {row.note}" if row.note else ""]
            lines += [
                f"    - {what}: {', '.join(f'`{name}`' for name in names)}" for what, names in parts.items() if names
            ]
        lines.append("")
    return re.sub(r"(- .*\n)\n+(?= +- )", r"\1", "\n".join(lines))


TAGGED = tagged()

if __name__ == "__main__":
    PAGE.write_text(page())
