"""Write paper.md: where each algorithm, equation, figure, table and claim of the paper is in the code.

python docs/paper_map.py

Each ``Row`` in ``SECTIONS`` is one part of the paper. Its tags select the classes and functions that implement this
part, by name or by text in the ``Paper:`` lines of their docstrings. The row also lists the tests and commands of the
part. tests/test_docs.py checks that the code, tests and commands exist, and that the page is up to date.
tests/paper/test_map_of_the_paper.py checks that the rows quote each paragraph, figure and algorithm of the paper.
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
    note: str = ""  # why there is no code, or how the code or its tests differ from what the paper says


FIG2, PAPER_RATES, DROPOUT = "reproduce fig2", "reproduce fig2 --plan paper-rates", "reproduce fig2 --plan dropout"
TABLES, CLAIMS = "reproduce/test_fig2_tables.py", "reproduce/test_claims.py"
GRADIENTS, MINI_BATCHES = "paper/test_sec_1_gradients.py", "paper/test_sec_1_mini_batches.py"
SIMPLIFICATIONS, IDENTITY = "paper/test_sec_3_simplifications.py", "paper/test_sec_3_identity.py"
INFERENCE, CONVOLUTION = "paper/test_sec_3_1_inference.py", "paper/test_sec_3_2_convolution.py"
SCALE, COMPANIONS = "paper/test_sec_3_3_scale.py", "paper/test_sec_3_4_companions.py"
NETWORK, SPARSITY = "paper/test_sec_4_2_network.py", "paper/test_sec_5_standardization_layer.py"
LAYER, REFERENCE, RECIPE = "layers.batch_norm.BatchNorm1d", "ops.reference.batch_norm", "train.recipe.Recipe"
CLAIM = "reproduce.imagenet.claims"
ABLATION = "reproduce.imagenet.fig2_tables.ablation"
ABLATION_TEST = f"{TABLES}::test_ablation"
RECIPE_TEST = "train/test_recipe.py::test_the_table"

# Text in double quotes is quoted from the row's section of the paper, without TeX commands.
SECTIONS: dict[str, list[Row]] = {
    "Abstract": [
        Row(
            '"makes it notoriously hard to train models with saturating nonlinearities"',
            ('Abstract, "saturating', f"{CLAIM}.at_chance"),
            (
                f"{CLAIMS}::test_saturation_starts_at_the_gaussian_tail_with_bn_and_everywhere_without",
                f"{TABLES}::test_the_sigmoid_without_bn",
            ),
            ("reproduce saturation", FIG2),
        ),
        Row(
            '"much higher learning rates"',
            (f"{CLAIM}.wider_range",),
            (f"{TABLES}::test_the_range_of_rates",),
            (FIG2,),
        ),
        Row(
            '"be less careful about initialization"',
            ('Abstract, "be less careful about initialization"',),
            (f"{CLAIMS}::test_init_small_weights_leave_the_plain_network_on_its_plateau",),
            ("reproduce init",),
        ),
        Row(
            '"acts as a regularizer, in some cases eliminating the need for Dropout"',
            ("=Sec. 3.4",),
            (f"{TABLES}::test_less_dropout",),
            (DROPOUT,),
        ),
        Row(
            '"the same accuracy with 14 times fewer training steps"',
            ("14 times fewer",),
            (f"{TABLES}::test_a_fourteenth_of_the_steps",),
            (FIG2,),
        ),
        Row(
            '"beats the original model by a significant margin"',
            ("reproduce.imagenet.fig2_tables.figure3",),
            (f"{TABLES}::test_figure3",),
            (FIG2,),
        ),
        Row(
            '"reaching 4.9% top-5 validation error (and 4.8% test error), exceeding the accuracy of human raters"',
            ("reproduce.imagenet.fig4.Fig4", "reproduce.imagenet.fig4_table.figure4"),
            ("reproduce/test_fig4.py::test_verdicts", "reproduce/test_fig4.py::test_a_first_session"),
            ("reproduce fig4",),
            "the numbers for test images and human raters cannot be measured here (see 4.2.3)",
        ),
    ],
    "1. Introduction": [
        Row(
            r"SGD: $\Theta = \arg\min_\Theta \frac{1}{N}\sum_i \ell(x_i, \Theta)$, with the gradient of a mini-batch",
            ("reproduce.mnist.training.train_",),
            ("reproduce/test_training.py::test_it_is_gradient_descent_through_the_layer_on_the_stated_order",),
            ("reproduce fig1",),
        ),
        Row(
            '"the gradient of the loss over a mini-batch is an estimate of the gradient over the training set, whose '
            'quality improves as the batch size increases"',
            ("reproduce.mnist.training.train_",),
            (
                f"{MINI_BATCHES}::test_the_mean_of_mini_batch_gradients_is_the_gradient_over_the_training_set",
                f"{MINI_BATCHES}::test_the_estimate_improves_as_the_batch_size_grows",
            ),
        ),
        Row(
            '"computation over a batch can be much more efficient than $m$ computations for individual examples"',
            note="not tested: tests must not assert how long something takes, and no benchmark compares the two",
        ),
        Row(
            '"small changes to the network parameters amplify as the network becomes deeper"',
            (LAYER,),
            (f"{GRADIENTS}::test_small_changes_of_the_weights_amplify_with_depth_but_not_with_bn",),
            note="the test changes only the scale of the weights",
        ),
        Row(
            r"Sub-networks: $\ell = F_2(F_1(u, \Theta_1), \Theta_2)$; a step of $\Theta_2$ is "
            '"exactly equivalent to that for a stand-alone network"',
            ("Sec. 2, internal covariate shift",),
            (f"{MINI_BATCHES}::test_a_gradient_step_of_the_upper_part_is_that_of_a_network_on_its_own",),
        ),
        Row(
            r'A step of $\Theta_1$ changes the input of $F_2$; "it is advantageous for the distribution of $x$ to '
            "remain "
            'fixed over time"',
            ("Sec. 2, internal covariate shift",),
            ("monitor/test_shift.py::test_gradient_change_is_section_2_by_hand",),
            ("reproduce fig1",),
        ),
        Row(
            """"As $|x|$ increases, $g'(x)$ tends to zero", so that the gradient vanishes""",
            ("reproduce.mnist.saturation.saturated",),
            (
                f"{GRADIENTS}::test_the_gradient_of_a_sigmoid_vanishes_far_from_zero",
                f"{GRADIENTS}::test_a_change_of_b_moves_sigmoids_into_the_saturated_regime_but_not_with_bn",
            ),
            ("reproduce saturation",),
        ),
        Row(
            '"This effect is amplified as the network depth increases"',
            ("reproduce.mnist.saturation.saturated",),
            (f"{GRADIENTS}::test_saturation_slows_down_more_as_the_depth_increases",),
        ),
        Row(
            'With stable inputs, "the optimizer would be less likely to get stuck in the saturated regime"',
            ("Sec. 1,",),
            (f"{CLAIMS}::test_saturation_starts_at_the_gaussian_tail_with_bn_and_everywhere_without",),
            ("reproduce saturation",),
        ),
        Row(
            '"a normalization step that fixes the means and variances of layer inputs"',
            (LAYER, REFERENCE),
            (f"{IDENTITY}::test_normalized_values_have_mean_0_and_variance_1",),
        ),
        Row(
            '"reducing the dependence of gradients on the scale of the parameters or of their initial values"',
            ("reproduce.mnist.scale.Scale", "reproduce.mnist.initialization.Init"),
            (f"{GRADIENTS}::test_the_gradient_depends_on_the_scale_of_the_weights_but_not_with_bn",),
            ("reproduce scale", "reproduce init"),
        ),
        Row(
            '"much higher learning rates without the risk of divergence"',
            (f"{CLAIM}.wider_range", f"{CLAIM}.diverges"),
            (f"{TABLES}::test_the_range_of_rates", f"{TABLES}::test_the_high_rate_without_bn"),
            (FIG2,),
        ),
        Row(
            '"match its performance using only 7% of the training steps"',
            (f"{CLAIM}.fewer_steps", "14 times fewer"),
            (f"{TABLES}::test_a_fourteenth_of_the_steps",),
            (FIG2,),
        ),
    ],
    "2. Towards Reducing Internal Covariate Shift": [
        Row(
            'Internal covariate shift: "the change in the distribution of network activations due to the change in '
            "network "
            'parameters during training"',
            ('Sec. 2, "the change', "Sec. 2, internal covariate shift"),
            ("monitor/test_shift.py::test_drift_is_the_formula_and_ignores_scale",),
            ("reproduce fig1",),
        ),
        Row(
            '"the network training converges faster if its inputs are whitened"',
            (REFERENCE,),
            (f"{SIMPLIFICATIONS}::test_normalization_speeds_up_convergence_and_whitening_does_even_more",),
        ),
        Row(
            r"$\hat x = x - E[x]$ with $x = u + b$: if the step ignores that $E[x]$ depends on $b$, "
            '"$b$ will grow indefinitely while the loss remains fixed"',
            ("=Sec. 2", "ignores the dependence"),
            (f"{CLAIMS}::test_section2_b_grows_without_end_while_the_loss_stays",),
            ("reproduce section2",),
        ),
        Row(
            '"This problem can get worse if the normalization not only centers but also scales the activations": '
            '"the model blows up when the normalization parameters are computed outside the gradient descent step"',
            ("=Sec. 2", "ignores the dependence"),
            (f"{CLAIMS}::test_section2_command",),
            ("reproduce section2",),
        ),
        Row(
            r"The gradient needs the Jacobians of $\mathrm{Norm}(x, \mathcal{X})$ with respect to $x$ and to "
            r"$\mathcal{X}$; "
            '"ignoring the latter term would lead to the explosion described above"',
            ("Sec. 3, gradients", "ignores the dependence"),
            (
                "ops/test_reference.py::test_the_six_equations_are_the_derivatives",
                f"{SIMPLIFICATIONS}::test_the_statistics_take_part_in_the_gradient",
            ),
            ("reproduce section2",),
        ),
        Row(
            r'Whitening, $\mathrm{Cov}[x]^{-1/2}(x - E[x])$: "whitening the layer inputs is expensive"',
            note="not implemented: the paper rejects it",
        ),
        Row(
            'Statistics of a single example or location: "discarding the absolute scale of activations"',
            (LAYER, REFERENCE),
            (
                "paper/test_sec_2_scale_of_activations.py::test_statistics_of_a_single_example_discard_its_scale",
                "paper/test_sec_2_scale_of_activations.py::"
                "test_statistics_over_feature_maps_at_a_location_discard_its_scale",
            ),
        ),
    ],
    "3. Normalization via Mini-Batch Statistics": [
        Row(
            r"$\hat x^{(k)} = (x^{(k)} - E[x^{(k)}]) / \sqrt{\mathrm{Var}[x^{(k)}]}$: "
            '"normalize each scalar feature independently"',
            ("Alg. 1, l. 1-2",),
            ("ops/test_reference.py::test_algorithm_1_by_hand",),
        ),
        Row(
            '"such normalization speeds up convergence, even when the features are not decorrelated"',
            (REFERENCE,),
            (f"{SIMPLIFICATIONS}::test_normalization_speeds_up_convergence_and_whitening_does_even_more",),
        ),
        Row(
            '"normalizing the inputs of a sigmoid would constrain them to the linear regime of the nonlinearity"',
            (REFERENCE,),
            (
                f"{SIMPLIFICATIONS}::test_normalized_inputs_of_a_sigmoid_stay_in_its_linear_regime_unless_gamma_is_large",
            ),
        ),
        Row(
            '"the transformation inserted in the network can represent the identity transform": '
            r"$\gamma = \sqrt{\mathrm{Var}[x]}$, $\beta = E[x]$",
            ("Sec. 3 (identity)",),
            (
                f"{IDENTITY}::test_identity_transform",
                "surgery/test_insert.py::test_identity_computes_what_the_network_computed",
            ),
        ),
        Row(
            '"each mini-batch produces estimates of the mean and variance"',
            ("Alg. 1, l. 1-2",),
            ("test_population.py::test_the_gap_and_the_standard_error",),
        ),
        Row(
            '"the statistics used for normalization can fully participate in the gradient backpropagation"',
            ("Sec. 3, gradients",),
            (f"{SIMPLIFICATIONS}::test_the_statistics_take_part_in_the_gradient",),
        ),
        Row(
            'Joint whitening: "the mini-batch size is likely to be smaller than the number of activations being '
            'whitened, resulting in singular covariance matrices"',
            ("Alg. 1, l. 1-2",),
            (f"{SIMPLIFICATIONS}::test_a_mini_batch_smaller_than_the_number_of_activations_has_a_singular_covariance",),
        ),
        Row(
            '**Algorithm 1**: "Batch Normalizing Transform, applied to activation $x$ over a mini-batch"',
            ("Alg. 1",),
            ("ops/test_reference.py::test_algorithm_1_by_hand", "ops/test_batch_norm.py::test_hard_case"),
            ("bench cpu", "bench kernels"),
        ),
        Row(
            r'$\epsilon$: "a constant added to the mini-batch variance for numerical stability"',
            (LAYER, REFERENCE),
            (
                f"{IDENTITY}::test_eps_lowers_the_variance_by_var_over_var_plus_eps",
                f"{SCALE}::test_with_eps_within_its_bound",
            ),
        ),
        Row(
            '"depends both on the training example and the other examples in the mini-batch"',
            (LAYER, REFERENCE),
            (f"{COMPANIONS}::test_training_output_depends_on_companions_less_and_less_with_m",),
        ),
        Row(
            r"Neglecting $\epsilon$, $\sum \hat x_i = 0$ and $\frac{1}{m}\sum \hat x_i^2 = 1$: "
            '"fixed means and variances"',
            (LAYER, REFERENCE),
            (f"{IDENTITY}::test_normalized_values_have_mean_0_and_variance_1",),
        ),
        Row(
            'The six gradients: "BN transform is a differentiable transformation"',
            ("Sec. 3, gradients",),
            (
                "ops/test_reference.py::test_gradients_by_hand",
                "ops/test_reference.py::test_gradcheck_and_gradgradcheck",
            ),
            ("bench cpu", "bench kernels"),
        ),
    ],
    "3.1. Training and Inference with Batch-Normalized Networks": [
        Row(
            '**Algorithm 2**: "Training a Batch-Normalized Network"',
            ("Sec. 4.1; Alg. 2", "train.loop.train"),
            ("reproduce/test_fig1.py::test_the_folded_network_is_the_unfolded_one",),
            ("reproduce fig1", "train"),
        ),
        Row(
            '**Algorithm 2, lines 1-5**: "specify a subset of activations and insert the BN transform for each of '
            'them"',
            ("Alg. 2, l. 1-5", "subset of activations"),
            ("surgery/test_insert.py::test_training_it_equals_training_the_published_form_step_by_step",),
            ("train", "compare"),
        ),
        Row(
            '**Algorithm 2, line 6**: train by "batch gradient descent, or Stochastic Gradient Descent", '
            '"or with any of its variants"',
            ("Sec. 3.1; Sec. 4.1", "Sec. 4.2.2; Alg. 2, l. 7-11", "reproduce.mnist.optimizers.Optimizers"),
            (f"{CLAIMS}::test_every_optimizer_trains_with_bn",),
            ("train", "reproduce optimizers"),
        ),
        Row(
            'Stochastic gradient descent needs "a mini-batch size $m>1$"',
            (LAYER,),
            ("known_problems/test_single_example.py::test_error_names_the_layer_and_the_ways_out",),
        ),
        Row(
            '"we want the output to depend only on the input, deterministically"',
            (LAYER,),
            (f"{COMPANIONS}::test_evaluation_output_depends_on_itself_alone",),
        ),
        Row(
            r"**Algorithm 2, lines 7-10**: $E[x] = E_B[\mu_B]$, $\mathrm{Var}[x] = \frac{m}{m-1} E_B[\sigma_B^2]$, "
            '"the unbiased variance estimate"',
            ("Alg. 2, l. 8-10", "=Alg. 2, l. 10", "Alg. 2, l. 7-1"),
            (
                "test_population.py::test_the_papers_rule_for_equal_batches_is_its_formula",
                f"{INFERENCE}::test_stored_variance_is_unbiased",
            ),
            ("bench algorithm2",),
        ),
        Row(
            r'"Neglecting $\epsilon$, these normalized activations have the same mean 0 and variance 1 as during '
            'training"',
            ("Alg. 2, l. 8-10",),
            (f"{INFERENCE}::test_population_statistics_keep_mean_0_and_variance_1",),
        ),
        Row(
            '"Using moving averages instead, we can track the accuracy of a model as it trains"',
            ("moving averages",),
            ("ops/test_running.py::test_equals_torch",),
            ("reproduce fig1", "train"),
        ),
        Row(
            r"**Algorithm 2, lines 11-12**: $y = \frac{\gamma}{\sqrt{\mathrm{Var}[x] + \epsilon}} x + (\beta - "
            r'\frac{\gamma E[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}})$, "a single linear transform"',
            ("Alg. 2, l. 11",),
            (
                f"{INFERENCE}::test_inference_is_one_linear_transform_per_activation",
                "inference/test_fold.py::test_fold_equals_eval",
            ),
            ("fold", "bench algorithm2"),
        ),
    ],
    "3.2. Batch-Normalized Convolutional Networks": [
        Row(
            r"$z = g(Wu + b)$ becomes $z = g(\mathrm{BN}(Wu))$: "
            '"the bias $b$ can be ignored since its effect will be canceled by the subsequent mean subtraction"',
            ("z = g(BN(Wu))", "z = g(Wu + b)", "l. 1-5; Sec. 3.2", "Sec. 3.2 (bias)"),
            (
                f"{CONVOLUTION}::test_a_bias_before_bn_is_canceled",
                "known_problems/test_conventions.py::test_insert_leaves_no_dead_bias",
            ),
            ("diagnose",),
        ),
        Row(
            'Normalizing $u$ instead: "constraining its first and second moments would not eliminate the covariate '
            'shift"',
            ("reproduce.mnist.placement.Placement",),
            (f"{CONVOLUTION}::test_two_moments_fix_the_distribution_of_wu_but_not_of_a_nonlinearitys_output",),
            ("reproduce placement",),
        ),
        Row(
            '$Wu + b$ is "more likely to have a symmetric, non-sparse distribution, that is more Gaussian"',
            ('Sec. 3.2, "',),
            (f"{CLAIMS}::test_relu_outputs_are_sparser_and_more_skewed_than_their_inputs",),
            ("reproduce placement",),
        ),
        Row(
            r"Feature maps, $m' = m \cdot p\,q$: "
            '"we jointly normalize all the activations in a mini-batch, over all locations"',
            ("Sec. 3.2 (convolutional)", "Sec. 3.2; Sec. 4.2.3", "layers.batch_norm.BatchNorm3d"),
            (
                f"{CONVOLUTION}::test_a_feature_map_is_a_fully_connected_batch_of_all_its_locations",
                f"{CONVOLUTION}::test_convolutional_property",
            ),
            ("bench cpu", "bench kernels"),
        ),
        Row(
            r'$\gamma$ and $\beta$ "per feature map, rather than per activation"',
            ("Sec. 3.2; Sec. 4.2.3",),
            (f"{IDENTITY}::test_two_parameters_per_activation",),
        ),
        Row(
            '"during inference the BN transform applies the same linear transformation to each activation in a given '
            'feature map"',
            ("Sec. 3.2; Sec. 4.2.3", "Alg. 2, l. 11"),
            (f"{CONVOLUTION}::test_at_inference_all_locations_of_a_map_get_the_same_linear_transform",),
            ("fold",),
        ),
    ],
    "3.3. Batch Normalization enables higher learning rates": [
        Row(
            '"too-high learning rate may result in the gradients that explode or vanish"',
            (f"{CLAIM}.diverges", "reproduce.imagenet.fig2_tables.rates", "Sec. 3.3, 3.4"),
            (f"{TABLES}::test_the_high_rate_without_bn", f"{TABLES}::test_rates"),
            (FIG2,),
        ),
        Row(
            '"it prevents small changes to the parameters from amplifying into larger and suboptimal changes in '
            'activations"',
            (LAYER,),
            (f"{GRADIENTS}::test_small_changes_of_the_weights_amplify_with_depth_but_not_with_bn",),
            note="the test changes only the scale of the weights",
        ),
        Row(
            '"it prevents the training from getting stuck in the saturated regimes of nonlinearities"',
            ("Sec. 1,",),
            (f"{GRADIENTS}::test_a_change_of_b_moves_sigmoids_into_the_saturated_regime_but_not_with_bn",),
            ("reproduce saturation",),
        ),
        Row(
            '"large learning rates may increase the scale of layer parameters, which then amplify the gradient during '
            'backpropagation"',
            ("reproduce.mnist.scale.Scale",),
            (f"{SCALE}::test_without_bn_the_scale_of_the_weights_scales_the_gradient",),
            ("reproduce scale",),
        ),
        Row(
            r"$\mathrm{BN}(Wu) = \mathrm{BN}((aW)u)$: "
            '"backpropagation through a layer is unaffected by the scale of its parameters"',
            ("reproduce.mnist.scale.Scale",),
            (f"{SCALE}::test_scale_of_the_weights_does_not_matter", f"{SCALE}::test_with_eps_within_its_bound"),
            ("reproduce scale",),
        ),
        Row(
            r"$\partial\,\mathrm{BN}((aW)u) / \partial u$ does not depend on $a$: "
            '"The scale does not affect the layer Jacobian"',
            ("reproduce.mnist.scale.Scale",),
            (f"{SCALE}::test_jacobians", f"{SCALE}::test_jacobians_with_eps"),
            ("reproduce scale",),
        ),
        Row(
            r"$\partial\,\mathrm{BN}((aW)u) / \partial (aW) = \frac{1}{a} \partial\,\mathrm{BN}(Wu) / \partial W$: "
            '"larger weights lead to smaller gradients"',
            ("reproduce.mnist.scale.Scale",),
            (f"{SCALE}::test_jacobians", f"{SCALE}::test_jacobians_with_eps"),
            ("reproduce scale",),
        ),
        Row(
            '"Batch Normalization will stabilize the parameter growth"',
            ("reproduce.mnist.scale.Scale",),
            (f"{SCALE}::test_larger_weights_get_smaller_gradients_and_stop_growing",),
            ("reproduce scale",),
        ),
        Row(
            r'Layer Jacobians, $\hat z = F(\hat x)$: conjecture that they "have singular values close to 1"',
            ("Sec. 3.3, layer", "Sec. 3.3, z_hat", "l. 10; Sec. 3.3"),
            (f"{CLAIMS}::test_the_jacobian_is_autograds",),
            ("reproduce jacobian",),
        ),
        Row(
            r"If $\hat x$ and $\hat z = J \hat x$ are Gaussian and uncorrelated, "
            r"$I = \mathrm{Cov}[\hat z] = J\,\mathrm{Cov}[\hat x]\,J^T = JJ^T$: "
            '"all singular values of $J$ are equal to 1, which preserves the gradient magnitudes"',
            ("Sec. 3.3, z_hat",),
            ("paper/test_sec_3_3_jacobian.py::test_the_covariance_of_the_outputs_is_j_j_transposed",),
        ),
    ],
    "3.4. Batch Normalization regularizes the model": [
        Row(
            '"no longer producing deterministic values for a given training example"',
            (LAYER, REFERENCE),
            (
                f"{COMPANIONS}::test_training_output_depends_on_companions_less_and_less_with_m",
                f"{COMPANIONS}::test_evaluation_output_depends_on_itself_alone",
            ),
        ),
        Row(
            '"advantageous to the generalization of the network"',
            ("=Sec. 3.4",),
            (f"{TABLES}::test_dropout",),
            (DROPOUT,),
        ),
        Row(
            'Dropout "can be either removed or reduced in strength"',
            ("=Sec. 3.4",),
            (f"{TABLES}::test_less_dropout", f"{TABLES}::test_what_dropout_is_worth"),
            (DROPOUT,),
        ),
    ],
    "4. Experiments": [],
    "4.1. Activations over time": [
        Row(
            'The MNIST network: "3 fully-connected hidden layers with 100 activations each"',
            ("models.perceptron.perceptron",),
            ("models/test_perceptron.py::test_it_is_the_network_of_section_4_1",),
            ("reproduce fig1",),
        ),
        Row(
            '"a 28x28 binary image as input"',
            ("data.digits.mnist", "data.digits.MNIST", "data.digits.Digits"),
            ("paper/test_sec_4_1_setting.py::test_binary_images_of_28_by_28",),
            ("reproduce fig1",),
        ),
        Row(
            '"small random Gaussian values"',
            ("models.perceptron.perceptron", "reproduce.mnist.initialization.Init"),
            ("models/test_perceptron.py::test_std_is_the_width_of_the_gaussians",),
            ("reproduce init",),
        ),
        Row(
            '"50000 steps, with 60 examples per mini-batch"',
            ("reproduce.mnist.training.Setting", "reproduce.mnist.fig1.Fig1", "Sec. 4.1; Alg. 2"),
            ("paper/test_sec_4_1_setting.py::test_50000_steps_of_60_examples",),
            ("reproduce fig1",),
        ),
        Row(
            '**Figure 1 (a)**: "Batch Normalization helps the network train faster and achieve higher accuracy"',
            ("Fig. 1 a", "=Fig. 1"),
            (
                "reproduce/test_fig1.py::test_batch_normalization_trains_faster_at_an_equal_rate",
                f"{CLAIMS}::test_comparison",
            ),
            ("reproduce fig1", "reproduce comparison"),
        ),
        Row(
            '**Figure 1 (b, c)**: "The evolution of input distributions to a typical sigmoid, over the course of '
            'training"',
            ("Fig. 1 b, c",),
            (
                "monitor/test_percentiles.py::test_percentiles_equal_torch_quantile",
                "monitor/test_shift.py::test_the_typical_unit_is_the_median",
            ),
            ("reproduce fig1",),
        ),
        Row(
            'Without BN, distributions "change significantly over time, both in their mean and the variance"; '
            'with BN, they are "much more stable as training progresses"',
            ("monitor.shift.drift", "report.figure1.paper_versus_here"),
            (
                "monitor/test_shift.py::test_drift_is_the_formula_and_ignores_scale",
                "reproduce/test_fig1.py::test_every_measure_is_recorded",
            ),
            ("reproduce fig1",),
        ),
    ],
    "4.2. ImageNet classification": [
        Row(
            'The network: "Convolutional layers use ReLU as the nonlinearity"',
            ("Appendix; Sec. 4.2",),
            (f"{NETWORK}::test_every_convolution_has_bn_and_the_nonlinearity_behind_it",),
            ("describe inception",),
        ),
        Row(
            '"replaced by two consecutive layers of 3x3 convolutions with up to 128 filters"',
            ("models.bn_inception.blocks.InceptionModule",),
            (f"{NETWORK}::test_two_3x3_convolutions_replace_each_5x5",),
            ("describe inception",),
            "the code follows the table in the appendix, which has up to 256 filters",
        ),
        Row(
            r'"contains $13.6 \cdot 10^6$ parameters"',
            ("models.description.claims",),
            ("models/test_inception.py::test_parameter_counts",),
            ("describe inception",),
            "the network of the table in the appendix has fewer (11.2 million)",
        ),
        Row(
            '"other than the top softmax layer, has no fully-connected layers"',
            ("models.bn_inception.network.inception",),
            (f"{NETWORK}::test_the_classifier_is_the_only_fully_connected_layer",),
            ("describe inception",),
        ),
        Row(
            '"Stochastic Gradient Descent with momentum, using the mini-batch size of 32"',
            ("Sec. 4.2, 4.2.1", 'Sec. 4.2, "a version of Stochastic'),
            (RECIPE_TEST,),
            ("train",),
        ),
        Row(
            '"a large-scale, distributed architecture"',
            ("train.loop.train",),
            ("train/test_distributed.py::test_split_batch_with_sync_equals_one_process",),
            ("train",),
            "here, all processes of a run work on the same step; the paper's system is not available",
        ),
        Row(
            '"validation accuracy @1", with "a single crop per image"',
            ("=Sec. 4.2", "Sec. 4.2 (", 'Sec. 4.2, "validation'),
            ("evaluate/test_accuracy.py::test_score_against_a_loop",),
            ("evaluate", "train"),
        ),
        Row(
            '"Batch Normalization was applied to the input of each nonlinearity, in a convolutional way"',
            ("models.bn_inception.network.inception", "models.bn_inception.blocks.Unit"),
            ("models/test_inception.py::test_the_normalized_form_is_insert_of_the_plain_form",),
            ("describe inception",),
        ),
        Row(
            '**Figure 2**: "Single crop validation accuracy of Inception and its batch-normalized variants, vs. the '
            "number "
            'of training steps"',
            ("Fig. 2", "Figs. 2"),
            ("reproduce/test_fig2.py::test_what_a_session_publishes",),
            (FIG2, "compare"),
        ),
        Row(
            '**Figure 3**: "the number of training steps required to reach the maximum accuracy of Inception (72.2%), '
            "and "
            'the maximum accuracy achieved by the network"',
            ("Fig. 3",),
            (f"{TABLES}::test_figure3",),
            (FIG2,),
        ),
    ],
    "4.2.1. Accelerating BN Networks": [
        Row(
            '"Simply adding Batch Normalization to a network does not take full advantage of our method": '
            "the seven modifications",
            ("Sec. 4.2.1, 4.2.2", "=Sec. 4.2.1", RECIPE),
            ("reproduce/test_fig2.py::test_the_ablation_takes_back_one_modification_each", ABLATION_TEST),
            (PAPER_RATES,),
        ),
        Row(
            '"Increase learning rate": "a training speedup from higher learning rates, with no ill side effects"',
            (RECIPE, ABLATION, "reproduce.imagenet.fig2_tables.rates", f"{CLAIM}.wider_range"),
            (RECIPE_TEST, f"{TABLES}::test_rates", ABLATION_TEST),
            (FIG2, PAPER_RATES),
        ),
        Row(
            '"Removing Dropout from Modified BN-Inception speeds up training, without increasing overfitting"',
            (RECIPE, ABLATION, "=Sec. 3.4"),
            (RECIPE_TEST, f"{TABLES}::test_less_dropout", ABLATION_TEST),
            (DROPOUT, PAPER_RATES),
            "the runs compare final accuracies, not the speed of training",
        ),
        Row(
            'The $L_2$ weight regularization: "the weight of this loss is reduced by a factor of 5", and '
            '"this improves the accuracy on the held-out validation data"',
            (RECIPE, ABLATION),
            (RECIPE_TEST, "train/test_recipe.py::test_weight_decay_spares_gamma_and_beta", ABLATION_TEST),
            (PAPER_RATES,),
        ),
        Row(
            '"we lower the learning rate 6 times faster"',
            (RECIPE, ABLATION),
            ("train/test_recipe.py::test_six_times_faster_decay", ABLATION_TEST),
            (PAPER_RATES,),
        ),
        Row(
            '"Remove Local Response Normalization": "with Batch Normalization it is not necessary"',
            ('"Remove Local', RECIPE, ABLATION),
            (
                "train/test_recipe.py::test_network_of_a_recipe",
                "models/test_inception.py::test_local_response_normalization_as_a_convolution",
                ABLATION_TEST,
            ),
            (PAPER_RATES,),
        ),
        Row(
            '"Shuffle training examples more thoroughly": "prevents the same examples from always appearing in a '
            'mini-batch together"',
            ('"Shuffle', RECIPE),
            (
                "data/test_order.py::test_fixed_order_lets_the_same_examples_meet_and_a_new_one_does_not",
                "data/test_order.py::test_examples_are_permuted_within_shards",
            ),
            ("train",),
        ),
        Row(
            'Shuffling within shards "led to about 1% improvements in the validation accuracy"',
            (ABLATION,),
            (ABLATION_TEST,),
            (PAPER_RATES,),
        ),
        Row(
            '"Reduce the photometric distortions"',
            ('"Reduce the photometric', RECIPE, ABLATION),
            ("data/test_augment.py::test_reduced_distorts_less_than_full", ABLATION_TEST),
            (PAPER_RATES,),
        ),
    ],
    "4.2.2. Single-Network Classification": [
        Row(
            '"trained on the LSVRC2012 training data, and tested on the validation data"',
            ("data.images.open_images",),
            ("data/test_imagenet_tars.py::test_official_tars_become_shards",),
            ("shard", "train"),
            "the published runs use 100 classes at 64 px",
        ),
        Row(
            'The networks: Inception, "trained with the initial learning rate of 0.0015"; '
            'BN-Baseline, "Same as Inception with Batch Normalization before each nonlinearity"; '
            'BN-x5, "increased by a factor of 5, to 0.0075"; '
            'BN-x30, "0.045 (30 times that of Inception)"; '
            'BN-x5-Sigmoid, "Like BN-x5, but with sigmoid nonlinearity"',
            (RECIPE,),
            (RECIPE_TEST, "train/test_recipe.py::test_no_recipe_is_missing"),
            ("train",),
        ),
        Row(
            'With 5 times the learning rate, Inception\'s parameters "reach machine infinity"',
            ("machine infinity", "reproduce.imagenet.fig2_tables.failures"),
            (f"{TABLES}::test_the_high_rate_without_bn",),
            (FIG2,),
        ),
        Row(
            r'"Inception reached the accuracy of 72.2% after $31 \cdot 10^6$ training steps"',
            ("Fig. 3", RECIPE),
            (f"{TABLES}::test_figure3",),
            (FIG2,),
        ),
        Row(
            'BN-Baseline: "we match the accuracy of Inception in less than half the number of training steps"',
            (f"{CLAIM}.fewer_steps", f"{CLAIM}.verdicts"),
            (f"{TABLES}::test_half_the_steps",),
            (FIG2,),
        ),
        Row(
            '"By applying the modifications in Sec., we significantly increase the training speed of the network"',
            ("reproduce.imagenet.fig2_tables.figure3",),
            (f"{TABLES}::test_figure3", f"{TABLES}::test_steps_on_the_way"),
            (FIG2,),
        ),
        Row(
            '"BN-x5 needs 14 times fewer steps than Inception to reach the 72.2% accuracy"',
            ("14 times fewer", f"{CLAIM}.fewer_steps"),
            (f"{TABLES}::test_a_fourteenth_of_the_steps",),
            (FIG2,),
        ),
        Row(
            'BN-x30: "causes the model to train somewhat slower initially"',
            ("slower initially",),
            (f"{TABLES}::test_bn_x30_early",),
            (FIG2,),
        ),
        Row(
            'BN-x30: "allows it to reach a higher final accuracy"',
            ("higher final accuracy",),
            (f"{TABLES}::test_bn_x30_in_the_end",),
            (FIG2,),
        ),
        Row(
            r'BN-x30: "74.8% after $6 \cdot 10^6$ steps, i.e. 5 times fewer steps than required by Inception to reach '
            '72.2%"',
            ("reproduce.imagenet.fig2_tables.figure3", RECIPE),
            (f"{TABLES}::test_figure3",),
            (FIG2,),
            "the table of Figure 3 has both numbers of steps; there is no verdict on their ratio",
        ),
        Row(
            '"BN-x5-Sigmoid achieves the accuracy of 69.8%"',
            ("BN-x5-Sigmoid",),
            (f"{TABLES}::test_the_sigmoid_with_bn",),
            (FIG2,),
        ),
        Row(
            '"Inception with sigmoid never achieves better than 1/1000 accuracy"',
            ("1/1000", "reproduce.imagenet.fig2_tables.failures"),
            (f"{TABLES}::test_the_sigmoid_without_bn",),
            (FIG2,),
        ),
    ],
    "4.2.3. Ensemble Classification": [
        Row(
            '"we used 6 networks"; "increased initial weights in the convolutional layers"; '
            '"Dropout probability of 5% or 10%, vs. 40% for the original Inception"',
            ("models.bn_inception.network.inception", "reproduce.imagenet.fig4.Fig4", RECIPE),
            (
                "reproduce/test_fig4.py::test_the_committed_plan_is_the_six_members_for_as_long_as_the_ablation",
                "models/test_inception.py::test_initialization",
            ),
            ("reproduce fig4",),
        ),
        Row(
            '"non-convolutional, per-activation Batch Normalization with last hidden layers of the model"',
            ("Sec. 4.2.3 (per activation",),
            (
                "layers/test_batch_norm.py::test_per_activation_is_fully_connected_on_the_flattened_input",
                "models/test_inception.py::test_per_activation_normalization_of_the_last_rows",
            ),
            ("reproduce fig4",),
        ),
        Row(
            r'"Each network achieved its maximum accuracy after about $6 \cdot 10^6$ training steps"',
            ("reproduce.imagenet.fig4.Fig4", RECIPE),
            ("reproduce/test_fig4.py::test_the_committed_plan_is_the_six_members_for_as_long_as_the_ablation",),
            ("reproduce fig4",),
            "the recipes of the six networks have this length, but the published runs are shorter",
        ),
        Row(
            '"the arithmetic average of class probabilities predicted by the constituent networks"',
            ("arithmetic average", "=Sec. 4.2.3"),
            ("evaluate/test_ensemble.py::test_the_mean_over_networks",),
            ("evaluate",),
        ),
        Row(
            '"multicrop inference" with 144 crops',
            ("multicrop",),
            (
                "evaluate/test_ensemble.py::test_the_mean_over_crops",
                "evaluate/test_crops.py::test_boxes_at_the_first_scale",
            ),
            ("evaluate",),
        ),
        Row(
            '**Figure 4**: "comparison with previous state of the art on the provided validation set comprising 50000 '
            'images"',
            ("Fig. 4",),
            ("reproduce/test_fig4.py::test_verdicts", "reproduce/test_fig4.py::test_steps_are_paired_over_images"),
            ("reproduce fig4", "evaluate"),
        ),
        Row(
            '"a top-5 validation error of 4.9%, and test error of 4.82%"',
            ("reproduce.imagenet.fig4.Fig4", "reproduce.imagenet.fig4_table.figure4"),
            ("reproduce/test_fig4.py::test_a_first_session",),
            ("reproduce fig4",),
            "the test error is only quoted: the labels of ImageNet's test images are not public",
        ),
        Row(
            '"exceeds the estimated accuracy of human raters"',
            ("reproduce.imagenet.fig4.Fig4",),
            ("reproduce/test_fig4.py::test_a_first_session",),
            ("reproduce fig4",),
            "only quoted: the estimate is from Russakovsky et al. (2014), and no human raters were tested here",
        ),
        Row(
            '"new state-of-the-art by a healthy margin on the ImageNet classification challenge benchmarks"',
            note="not tested: this is a comparison with the systems of 2015",
        ),
    ],
    "5. Conclusion": [
        Row(
            '"appropriately handled by any optimization method that is being used to train the network"',
            ("reproduce.mnist.optimizers.Optimizers",),
            (f"{CLAIMS}::test_every_optimizer_trains_with_bn",),
            ("reproduce optimizers",),
        ),
        Row(
            '"adds only two extra parameters per activation, and in doing so preserves the representation ability of '
            "the "
            'network"',
            (LAYER, REFERENCE),
            (f"{IDENTITY}::test_two_parameters_per_activation", f"{IDENTITY}::test_identity_transform"),
        ),
        Row(
            '"can be trained with saturating nonlinearities"',
            ("BN-x5-Sigmoid", "reproduce.mnist.saturation.Saturation"),
            (f"{TABLES}::test_the_sigmoid_with_bn",),
            (FIG2, "reproduce saturation"),
        ),
        Row(
            '"more tolerant to increased training rates"',
            (f"{CLAIM}.wider_range", "reproduce.imagenet.fig2_tables.rates"),
            (f"{TABLES}::test_the_range_of_rates", f"{TABLES}::test_rates"),
            (FIG2,),
        ),
        Row(
            '"often do not require Dropout for regularization"',
            ("=Sec. 3.4",),
            (f"{TABLES}::test_less_dropout",),
            (DROPOUT,),
        ),
        Row(
            '"Merely adding Batch Normalization to a state-of-the-art image classification model yields a substantial '
            'speedup in training"',
            (f"{CLAIM}.fewer_steps", "reproduce.compare.compare"),
            (f"{TABLES}::test_half_the_steps",),
            (FIG2, "compare"),
        ),
        Row(
            '"beat the state of the art in single-network image classification"',
            ("reproduce.imagenet.fig4_table.figure4",),
            ("reproduce/test_fig4.py::test_the_rows_of_single_networks_are_those_of_the_published_result_files",),
            ("reproduce fig4",),
            "the table quotes the paper's errors, but the published runs use fewer classes and smaller images",
        ),
        Row(
            'The standardization layer is applied "to the output of the nonlinearity"',
            ("Sec. 5, the standardization layer", "surgery.insert.insert"),
            ("surgery/test_insert.py::test_placement_after_the_nonlinearity",),
            ("reproduce placement",),
        ),
        Row(
            '"we have not observed the nonlinearity inputs to be sparse, neither with nor without Batch Normalization"',
            ("reproduce.mnist.placement.shapes",),
            (f"{SPARSITY}::test_inputs_of_nonlinearities_are_not_sparse_but_their_outputs_are",),
            ("reproduce placement",),
            "checked on MNIST; the paper's statement is about ImageNet",
        ),
        Row(
            'A linear layer after the standardization layer "absorbs the necessary scale and shift"',
            (REFERENCE,),
            (f"{SPARSITY}::test_a_linear_layer_behind_the_normalization_absorbs_scale_and_shift",),
        ),
        Row(
            'Differences: "the learned scale and shift that allow the BN transform to represent identity", '
            '"handling of convolutional layers", '
            '"deterministic inference that does not depend on the mini-batch", '
            '"batch-normalizing each convolutional layer in the network"',
            ("Alg. 2, l. 1-5", "Sec. 3.2 (convolutional)"),
            (
                f"{IDENTITY}::test_identity_transform",
                f"{CONVOLUTION}::test_convolutional_property",
                f"{COMPANIONS}::test_evaluation_output_depends_on_itself_alone",
                f"{NETWORK}::test_every_convolution_has_bn_and_the_nonlinearity_behind_it",
            ),
        ),
        Row(
            '"applications of our method to Recurrent Neural Networks"',
            ("Alg. 2, l. 1-5",),
            ("surgery/test_insert.py::test_a_recurrent_layer_is_named_with_the_reason",),
            note="the paper leaves this to future work; `insert` skips recurrent layers, and its report says why",
        ),
        Row(
            'Domain adaptation, "perhaps with just a recomputation of the population means and variances"',
            ("Sec. 5, domain adaptation",),
            ("paper/test_sec_5_domain_adaptation.py::test_new_statistics_restore_the_accuracy",),
        ),
    ],
    "Appendix. Variant of the Inception Model Used": [
        Row(
            '**Figure 5**: "Inception architecture", the table of the network\'s layers',
            ("Appendix",),
            (
                "models/test_inception.py::test_rows_are_the_printed_ones",
                "models/test_inception.py::test_outputs_are_the_printed_ones_with_projection_96",
            ),
            ("describe inception",),
        ),
        Row(
            '"documents the changes that were performed compared to the architecture" of GoogLeNet',
            ("models.description.claims",),
            ("models/test_description.py::test_ratios_to_googlenet",),
            ("describe inception",),
        ),
        Row(
            '"increases the maximum depth of the network by 9 weight layers"',
            ("models.description.claims",),
            ("models/test_description.py::test_ratios_to_googlenet",),
            ("describe inception",),
            "the network of the table is 12 layers deeper, or 13 with the separable first layer",
        ),
        Row(
            '"increases the number of parameters by 25% and the computational cost is increased by about 30%"',
            ("models.description.claims",),
            ("models/test_description.py::test_ratios_to_googlenet",),
            ("describe inception",),
            "the network of the table has 60% more parameters; with a plain first layer, it computes 28% more",
        ),
        Row(
            '"The number 28x28 inception modules is increased from 2 to 3"',
            ("models.bn_inception.network.rows",),
            (f"{NETWORK}::test_three_modules_of_28_by_28_instead_of_two",),
            ("describe inception",),
        ),
        Row(
            '"sometimes average, sometimes maximum-pooling is employed"',
            ("models.bn_inception.pooling.MaxPool2d", "models.bn_inception.pooling.AvgPool2d"),
            (f"{NETWORK}::test_the_kind_of_pooling_in_each_module",),
            ("describe inception",),
        ),
        Row(
            '"no across the board pooling layers between any two Inception modules, but stride-2 convolution/pooling '
            'layers are employed before the filter concatenation in the modules 3c, 4e"',
            ("models.bn_inception.blocks.InceptionModule",),
            (f"{NETWORK}::test_strides_of_2_are_inside_3c_and_4e",),
            ("describe inception",),
        ),
        Row(
            '"separable convolution with depth multiplier $8$ on the first convolutional layer"; '
            '"reduces the computational cost while increasing the memory consumption at training time"',
            ("depth multiplier 8",),
            (f"{NETWORK}::test_depth_multiplier_8_costs_less_computation_and_more_memory",),
            ("describe inception",),
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
        "Text in quotation marks is from the paper. The tests do not train networks on ImageNet. For claims about such",
        "training, they check only how a command judges its runs. The verdicts are on the pages of",
        "[Figures 2 and 3](fig2.md) and [Figure 4](fig4.md). To run an entry's tests: `python -m pytest tests/TEST`.",
        "",
        "`python docs/paper_map.py` writes this page from its own table and from the `Paper:` lines of docstrings.",
        "",
    ]
    for section, rows in SECTIONS.items():
        depth = section.split()[0].count(".") if section[0].isdigit() else 1
        lines += [f"{'#' * (depth + 1)} {section}", ""]
        for row in rows:
            parts = {"code": symbols(row), "tests": row.tests, "command": [f"batchnorm {c}" for c in row.commands]}
            lines += [f"- {row.says}", *([f"    - note: {row.note}"] if row.note else [])]
            lines += [
                f"    - {what}: {', '.join(f'`{name}`' for name in names)}" for what, names in parts.items() if names
            ]
        lines += [""] * bool(rows)
    return "\n".join(lines)


TAGGED = tagged()

if __name__ == "__main__":
    PAGE.write_text(page())
