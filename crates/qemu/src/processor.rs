//! The processor that a guest sees, and whether a host's own can give it.
//!
//! On KVM a guest executes on the host's processor, so what its model promises must be there, on
//! the primary and on whoever backs it up. QEMU alone would leave out what is missing and say so
//! in its log: the guest would find, after a take-over, instructions gone that it uses.

use crate::capabilities::Accelerator;
use crate::definition::VmDefinition;
use crate::qmp::{Connection, QmpError};
use crate::tsc::TscRate;
use qapi::qmp::{
    CpuModelExpansionType, CpuModelInfo, query_cpu_definitions, query_cpu_model_expansion,
};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::{fmt, fs};

/// The model of a guest on KVM whose definition names none: what every server processor since
/// 2011 has (x86-64-v2 with AES). QEMU's own default, `qemu64`, has neither SSE 4 nor AES. Without
/// the help for real mode in a task, which the first Zen lacks, and no guest of today uses.
pub const KVM_BASELINE: &str = "Westmere,vme=off";

/// Features that let a guest run guests of its own.
const NESTED: [&str; 2] = ["vmx", "svm"];

/// Properties of a model that take from each host's own processor what it has.
const OF_THE_HOST: [&str; 4] = ["host-cache-info", "host-phys-bits", "hv-passthrough", "pmu"];

/// Bytes of the name that a processor gives of its maker.
const MOST_VENDOR_BYTES: usize = 12;

/// Other names that QEMU has for features.
const ALIASES: [(&str, &str); 7] = [
    ("ffxsr", "fxsr-opt"),
    ("i64", "lm"),
    ("pclmuldq", "pclmulqdq"),
    ("sse3", "pni"),
    ("sse4-1", "sse4.1"),
    ("sse4-2", "sse4.2"),
    ("xd", "nx"),
];

/// The needs of a guest of a host's processor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuNeeds {
    /// The accelerator that executes it.
    pub accelerator: Accelerator,
    /// Its model, with flags, as QEMU takes it; none on TCG, where QEMU's default does.
    pub model: Option<String>,
    /// The rate of its time stamp counter, once it has run; none on TCG.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tsc: Option<TscRate>,
    /// The maker of its processor, once it has run; none on TCG, and of older hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vendor: Option<Vendor>,
}

impl CpuNeeds {
    /// The needs of a definition's guest on this accelerator.
    pub fn of(definition: &VmDefinition, accelerator: Accelerator) -> CpuNeeds {
        let model = cpu_model(definition, accelerator).map(str::to_owned);
        CpuNeeds { accelerator, model, tsc: None, vendor: None }
    }

    /// The same of a guest that has run with a counter of this rate.
    pub fn with_tsc(self, tsc: Option<TscRate>) -> CpuNeeds {
        CpuNeeds { tsc, ..self }
    }

    /// The same of a guest that has run on a processor of this maker.
    pub fn with_vendor(self, vendor: Option<Vendor>) -> CpuNeeds {
        CpuNeeds { vendor, ..self }
    }

    /// The maker that this guest on KVM has seen and a host with a processor of `own` does not show;
    /// none if its `model` itself names one.
    pub(crate) fn other_vendor(&self, model: &str, own: Option<&Vendor>) -> Option<&Vendor> {
        let is_named = model.split(',').any(|flag| flag.trim().starts_with("vendor="));
        self.vendor.as_ref().filter(|seen| !is_named && own != Some(*seen))
    }
}

/// The maker of a processor, by the name that it gives (`GenuineIntel`). On KVM a guest sees the
/// host's, whatever its model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Vendor(String);

impl Vendor {
    /// The maker of the processor that a guest sees which runs here; none on TCG, where QEMU's model has one.
    pub fn seen_here(accelerator: Accelerator) -> Option<Vendor> {
        match accelerator {
            Accelerator::Kvm => Vendor::of_this_machine(),
            Accelerator::Tcg => None,
        }
    }

    pub(crate) fn of_this_machine() -> Option<Vendor> {
        Vendor::in_cpuinfo(&fs::read_to_string("/proc/cpuinfo").ok()?)
    }

    fn in_cpuinfo(cpuinfo: &str) -> Option<Vendor> {
        let line = cpuinfo.lines().find(|line| line.starts_with("vendor_id"))?;
        Vendor::try_from(line.split_once(':')?.1.trim().to_owned()).ok()
    }
}

impl TryFrom<String> for Vendor {
    type Error = String;

    fn try_from(name: String) -> Result<Vendor, String> {
        let is_plain = |byte: u8| byte.is_ascii_graphic() || byte == b' ';
        match (1..=MOST_VENDOR_BYTES).contains(&name.len()) && name.bytes().all(is_plain) {
            true => Ok(Vendor(name)),
            false => Err(format!("{name:?} is no maker of processors")),
        }
    }
}

impl From<Vendor> for String {
    fn from(vendor: Vendor) -> String {
        vendor.0
    }
}

impl fmt::Display for Vendor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The model of a definition's guest: its own, else the accelerator's default.
pub fn cpu_model(definition: &VmDefinition, accelerator: Accelerator) -> Option<&str> {
    match (&definition.cpu, accelerator) {
        (Some(model), _) => Some(model),
        (None, Accelerator::Kvm) => Some(KVM_BASELINE),
        (None, Accelerator::Tcg) => None,
    }
}

/// The flag of a model by which the guest could run guests of its own.
pub fn nesting(model: &str) -> Option<&str> {
    flags(model).find(|(flag, on)| *on && NESTED.contains(flag)).map(|(flag, _)| flag)
}

/// The property of a model that would mean something else on every host.
pub(crate) fn of_the_host(model: &str) -> Option<&'static str> {
    let on = flags(model).filter(|(_, on)| *on).map(|(flag, _)| flag.replace('_', "-"));
    on.filter_map(|flag| OF_THE_HOST.into_iter().find(|other| *other == flag)).next()
}

/// The features that KVM offers of this host's processor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvmProcessor {
    /// Features by model that it promises and this processor lacks.
    lacks: BTreeMap<String, Vec<String>>,
    /// Features that it cannot offer to any model.
    absent: BTreeSet<String>,
}

impl KvmProcessor {
    /// Asks a QEMU that runs on KVM.
    pub(crate) fn ask(connection: &mut Connection) -> Result<KvmProcessor, QmpError> {
        let models = connection.execute::<_, Vec<Model>>(&query_cpu_definitions {})?;
        let max = CpuModelInfo { name: "max".to_owned(), props: None };
        // In its static expansion a model has all features, and next to nothing else: other properties, as Hyper-V's, are
        // off in `max` whatever the host can do, and QEMU itself refuses to start with one that it cannot give.
        let question =
            query_cpu_model_expansion { model: max, type_: CpuModelExpansionType::static_ };
        Ok(KvmProcessor::of(models, connection.execute(&question)?))
    }

    fn of(models: Vec<Model>, max: Expansion) -> KvmProcessor {
        let off = max.model.props.into_iter().filter(|(_, value)| *value == false);
        KvmProcessor {
            lacks: models.into_iter().map(|model| (model.name, model.unavailable)).collect(),
            absent: off.map(|(feature, _)| feature).collect(),
        }
    }

    /// The features that a guest needs and this processor lacks.
    pub fn missing(&self, needs: &CpuNeeds) -> Vec<String> {
        let Some(model) = needs.model.as_deref() else { return Vec::new() };
        let flags: BTreeMap<String, bool> =
            flags(model).map(|(flag, on)| (feature(flag), on)).collect();
        let promised = self.lacks.get(name(model)).into_iter().flatten();
        let unwanted = |name: &&String| flags.get(&feature(name)) == Some(&false);
        let mut missing: BTreeSet<String> =
            promised.filter(|feature| !unwanted(feature)).cloned().collect();
        let asked = flags.iter().filter(|(flag, on)| **on && self.absent.contains(*flag));
        missing.extend(asked.map(|(flag, _)| flag.clone()));
        missing.into_iter().collect()
    }
}

/// A model's name, without the flags that may follow it.
fn name(model: &str) -> &str {
    model.split(',').next().unwrap_or(model)
}

/// The name under which QEMU lists a feature.
fn feature(flag: &str) -> String {
    let flag = flag.replace('_', "-");
    let alias = ALIASES.iter().find(|(alias, _)| *alias == flag);
    alias.map_or(flag.clone(), |(_, name)| (*name).to_owned())
}

/// The features that a model's flags switch on or off; other properties have no yes or no.
fn flags(model: &str) -> impl Iterator<Item = (&str, bool)> {
    model.split(',').skip(1).filter_map(|flag| {
        let flag = flag.trim();
        match (flag.strip_prefix('+'), flag.strip_prefix('-'), flag.split_once('=')) {
            (Some(on), _, _) => Some((on, true)),
            (_, Some(off), _) => Some((off, false)),
            (_, _, Some((feature, "on"))) => Some((feature, true)),
            (_, _, Some((feature, "off"))) => Some((feature, false)),
            (_, _, Some(_)) => None,
            (_, _, None) => Some((flag, true)),
        }
    })
}

#[derive(Deserialize)]
struct Model {
    name: String,
    #[serde(rename = "unavailable-features", default)]
    unavailable: Vec<String>,
}

#[derive(Deserialize)]
struct Expansion {
    model: Expanded,
}

#[derive(Deserialize)]
struct Expanded {
    #[serde(default)]
    props: serde_json::Map<String, serde_json::Value>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// QEMU 10.0's answers, shortened: of `max` it has no word of `hv-time` or `enforce` here.
    fn processor() -> KvmProcessor {
        let models = json!([
            {"name": "Westmere", "unavailable-features": []},
            {"name": "Haswell", "unavailable-features": ["avx2", "rtm"]},
        ]);
        let max = json!({"model": {"name": "base", "props": {
            "aes": true, "sse4.2": true, "sse4.1": false, "pni": false, "avx": false, "avx2": false,
            "rtm": false, "kvm-pv-eoi": false, "family": 6, "model-id": "QEMU",
        }}});
        let (models, max) = (serde_json::from_value(models), serde_json::from_value(max));
        KvmProcessor::of(models.unwrap(), max.unwrap())
    }

    fn missing(model: &str) -> Vec<String> {
        let (accelerator, model) = (Accelerator::Kvm, Some(model.to_owned()));
        processor().missing(&CpuNeeds { accelerator, model, tsc: None, vendor: None })
    }

    #[test]
    fn what_a_processor_lacks_is_named() {
        assert_eq!(missing("Westmere"), [""; 0]);
        assert_eq!(missing("Haswell"), ["avx2", "rtm"]);
        assert_eq!(missing("Haswell,-rtm,+aes"), ["avx2"]);
        assert_eq!(missing("Haswell,rtm=off,avx2=off"), [""; 0]);
        assert_eq!(missing("Westmere,+avx,sse4.2=on,level=11"), ["avx"]);
        assert_eq!(missing("Westmere,sse4_1=on,+sse3"), ["pni", "sse4.1"]);
        assert_eq!(missing("Westmere,+sse4_2,kvm_pv_eoi=on"), ["kvm-pv-eoi"]);
    }

    // Before, each was missing on every host, and no imported Windows started on KVM.
    #[test]
    fn a_property_that_is_no_feature_of_the_processor_is_left_to_qemu() {
        let windows =
            "Westmere,vme=off,hv-relaxed=on,hv-vapic=on,hv-time=on,hv_vpindex,enforce,l3-cache=on";
        assert_eq!(missing(windows), [""; 0]);
    }

    #[test]
    fn kvm_guests_have_a_named_model() {
        let definition = |cpu: &str| -> VmDefinition {
            toml::from_str(&format!("name = \"a\"\nmemory = \"64M\"\nvcpus = 1\n{cpu}")).unwrap()
        };
        let without = definition("");
        assert_eq!(cpu_model(&without, Accelerator::Kvm), Some(KVM_BASELINE));
        assert_eq!(cpu_model(&without, Accelerator::Tcg), None);
        let own = definition("cpu = \"EPYC\"");
        assert_eq!(cpu_model(&own, Accelerator::Kvm), Some("EPYC"));
    }

    #[test]
    fn no_guest_on_kvm_gets_what_its_own_guests_would_need() {
        assert_eq!(nesting("EPYC,+svm"), Some("svm"));
        assert_eq!(nesting("Haswell,vmx=on"), Some("vmx"));
        assert_eq!(nesting("EPYC,-svm"), None);
    }

    #[test]
    fn no_guest_on_kvm_gets_what_each_host_has_otherwise() {
        assert_eq!(of_the_host("Haswell,pmu=on"), Some("pmu"));
        assert_eq!(of_the_host("Haswell,-rtm,+host_phys_bits"), Some("host-phys-bits"));
        assert_eq!(of_the_host("Haswell,pmu=off,phys-bits=40"), None);
    }

    #[test]
    fn the_maker_is_what_the_processor_says() {
        let cpuinfo = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: x\n";
        assert_eq!(Vendor::in_cpuinfo(cpuinfo), Vendor::try_from("AuthenticAMD".to_owned()).ok());
        assert_eq!(Vendor::in_cpuinfo("processor\t: 0\n"), None);
        for wrong in ["", "ThirteenBytes", "new\nline"] {
            assert!(Vendor::try_from(wrong.to_owned()).is_err(), "{wrong:?}");
        }
    }
}
