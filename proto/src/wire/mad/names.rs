//! Names of classes, methods and attributes, as the specification has them.

use super::{
    CLASS_BM, CLASS_CM, CLASS_CONGESTION, CLASS_DEVICE, CLASS_PERF, CLASS_SA, CLASS_SM,
    CLASS_SM_DIRECTED, CLASS_SNMP,
};

/// A management class (IBTA vol. 1, 13.4.4), such as `CM`, `SA`, `SMP`; `None` if it is reserved.
pub const fn class_name(class: u8) -> Option<&'static str> {
    Some(match class {
        CLASS_SM => "SMP",
        CLASS_SM_DIRECTED => "SMP_DIRECTED",
        CLASS_SA => "SA",
        CLASS_PERF => "PERF",
        CLASS_BM => "BM",
        CLASS_DEVICE => "DEV_MGT",
        CLASS_CM => "CM",
        CLASS_SNMP => "SNMP",
        0x10 => "DEV_ADM",
        0x11 => "BOOT_MGT",
        0x12 => "BIS",
        CLASS_CONGESTION => "CC",
        0x09..=0x0f | 0x30..=0x4f => "VENDOR",
        0x13..=0x2f => "APPLICATION",
        _ => return None,
    })
}

/// A method (IBTA vol. 1, 13.4.5; of SA 15.2.2), such as `Get`, `GetResp`, `Send`.
pub const fn method_name(class: u8, method: u8) -> Option<&'static str> {
    Some(match (class, method) {
        (_, 0x01) => "Get",
        (_, 0x02) => "Set",
        (_, 0x03) => "Send",
        (_, 0x05) => "Trap",
        (_, 0x06) => "Report",
        (_, 0x07) => "TrapRepress",
        (_, 0x81) => "GetResp",
        (_, 0x86) => "ReportResp",
        (CLASS_SA, 0x12) => "GetTable",
        (CLASS_SA, 0x13) => "GetTraceTable",
        (CLASS_SA, 0x14) => "GetMulti",
        (CLASS_SA, 0x15) => "Delete",
        (CLASS_SA, 0x92) => "GetTableResp",
        (CLASS_SA, 0x94) => "GetMultiResp",
        (CLASS_SA, 0x95) => "DeleteResp",
        _ => return None,
    })
}

/// An attribute, such as `REQ` (CM), `PathRecord` (SA), `NodeInfo` (SMP).
pub const fn attribute_name(class: u8, attribute: u16) -> Option<&'static str> {
    let own = match class {
        CLASS_SM | CLASS_SM_DIRECTED => sm(attribute),
        CLASS_SA => sa(attribute),
        CLASS_PERF => perf(attribute),
        CLASS_BM => bm(attribute),
        CLASS_DEVICE => device(attribute),
        CLASS_CM => cm(attribute),
        CLASS_SNMP => snmp(attribute),
        CLASS_CONGESTION => congestion(attribute),
        _ => None,
    };
    // Common to classes (13.4.8); SMPs have only Notice of them.
    match (own, attribute) {
        (Some(name), _) => Some(name),
        (None, 0x01) if !matches!(class, CLASS_SM | CLASS_SM_DIRECTED) => Some("ClassPortInfo"),
        (None, 0x02) => Some("Notice"),
        (None, 0x03) if !matches!(class, CLASS_SM | CLASS_SM_DIRECTED) => Some("InformInfo"),
        _ => None,
    }
}

/// IBTA vol. 1, 14.2.5.
const fn sm(attribute: u16) -> Option<&'static str> {
    Some(match attribute {
        0x10 => "NodeDescription",
        0x11 => "NodeInfo",
        0x12 => "SwitchInfo",
        0x14 => "GUIDInfo",
        0x15 => "PortInfo",
        0x16 => "P_KeyTable",
        0x17 => "SLtoVLMappingTable",
        0x18 => "VLArbitrationTable",
        0x19 => "LinearForwardingTable",
        0x1a => "RandomForwardingTable",
        0x1b => "MulticastForwardingTable",
        0x1c => "LinkSpeedWidthPairsTable",
        0x1d => "VendorSpecificMadsTable",
        0x1e => "HierarchyInfo",
        0x20 => "SMInfo",
        0x30 => "VendorDiag",
        0x31 => "LedInfo",
        0x32 => "CableInfo",
        0x33 => "PortInfoExtended",
        _ => return None,
    })
}

/// IBTA vol. 1, 15.2.5.
const fn sa(attribute: u16) -> Option<&'static str> {
    Some(match attribute {
        0x11 => "NodeRecord",
        0x12 => "PortInfoRecord",
        0x13 => "SLtoVLMappingTableRecord",
        0x14 => "SwitchInfoRecord",
        0x15 => "LinearForwardingTableRecord",
        0x16 => "RandomForwardingTableRecord",
        0x17 => "MulticastForwardingTableRecord",
        0x18 => "SMInfoRecord",
        0x19 => "LinkSpeedWidthPairsTableRecord",
        0x20 => "LinkRecord",
        0x30 => "GuidInfoRecord",
        0x31 => "ServiceRecord",
        0x33 => "P_KeyTableRecord",
        0x35 => "PathRecord",
        0x36 => "VLArbitrationTableRecord",
        0x38 => "MCMemberRecord",
        0x39 => "TraceRecord",
        0x3a => "MultiPathRecord",
        0x3b => "ServiceAssociationRecord",
        0x3c => "HierarchyInfoRecord",
        0x3d => "CableInfoRecord",
        0x3e => "PortInfoExtendedRecord",
        0xf3 => "InformInfoRecord",
        _ => return None,
    })
}

/// IBTA vol. 1, 16.1.3 and 16.1.4; congestion counters of annex A10.
const fn perf(attribute: u16) -> Option<&'static str> {
    Some(match attribute {
        0x10 => "PortSamplesControl",
        0x11 => "PortSamplesResult",
        0x12 => "PortCounters",
        0x15 => "PortRcvErrorDetails",
        0x16 => "PortXmitDiscardDetails",
        0x17 => "PortOpRcvCounters",
        0x18 => "PortFlowCtlCounters",
        0x19 => "PortVLOpPackets",
        0x1a => "PortVLOpData",
        0x1b => "PortVLXmitFlowCtlUpdateErrors",
        0x1c => "PortVLXmitWaitCounters",
        0x1d => "PortCountersExtended",
        0x1e => "PortSamplesResultExtended",
        0x1f => "PortExtendedSpeedsCounters",
        0x30 => "SwPortVLCongestion",
        0x31 => "PortRcvConCtrl",
        0x32 => "PortSLRcvFECN",
        0x33 => "PortSLRcvBECN",
        0x34 => "PortXmitConCtrl",
        0x35 => "PortVLXmitTimeCong",
        0x36 => "PortXmitDataSL",
        0x37 => "PortRcvDataSL",
        _ => return None,
    })
}

/// IBTA vol. 1, 16.2.3.
const fn bm(attribute: u16) -> Option<&'static str> {
    Some(match attribute {
        0x10 => "BKeyInfo",
        0x20 => "WriteVPD",
        0x21 => "ReadVPD",
        0x22 => "ResetIBML",
        _ => return None,
    })
}

/// IBTA vol. 1, 16.3.3.
const fn device(attribute: u16) -> Option<&'static str> {
    Some(match attribute {
        0x10 => "IOUnitInfo",
        0x11 => "IOControllerProfile",
        0x12 => "ServiceEntries",
        0x20 => "DiagnosticTimeout",
        0x21 => "PrepareToTest",
        0x22 => "TestDeviceOnce",
        0x23 => "TestDeviceLoop",
        0x24 => "DiagCode",
        _ => return None,
    })
}

/// IBTA vol. 1, 12.6 to 12.11 and 16.7.3.
const fn cm(attribute: u16) -> Option<&'static str> {
    Some(match attribute {
        super::cm::REQ => "REQ",
        super::cm::MRA => "MRA",
        super::cm::REJ => "REJ",
        super::cm::REP => "REP",
        super::cm::RTU => "RTU",
        super::cm::DREQ => "DREQ",
        super::cm::DREP => "DREP",
        super::cm::SIDR_REQ => "SIDR_REQ",
        super::cm::SIDR_REP => "SIDR_REP",
        super::cm::LAP => "LAP",
        super::cm::APR => "APR",
        super::cm::SAP => "SAP",
        super::cm::SPR => "SPR",
        _ => return None,
    })
}

/// IBTA vol. 1, 16.4.3.
const fn snmp(attribute: u16) -> Option<&'static str> {
    Some(match attribute {
        0x10 => "CommunityInfo",
        0x11 => "PDUInfo",
        _ => return None,
    })
}

/// IBTA vol. 1, annex A10.
const fn congestion(attribute: u16) -> Option<&'static str> {
    Some(match attribute {
        0x11 => "CongestionInfo",
        0x12 => "CongestionKeyInfo",
        0x13 => "CongestionLog",
        0x14 => "SwitchCongestionSetting",
        0x15 => "SwitchPortCongestionSetting",
        0x16 => "CACongestionSetting",
        0x17 => "CongestionControlTable",
        0x18 => "TimeStamp",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{collections::HashSet, vec::Vec};

    #[test]
    fn names_of_the_specification() {
        for (class, name) in [
            (0x01, "SMP"),
            (0x81, "SMP_DIRECTED"),
            (0x03, "SA"),
            (0x04, "PERF"),
            (0x07, "CM"),
            (0x09, "VENDOR"),
            (0x0f, "VENDOR"),
            (0x10, "DEV_ADM"),
            (0x21, "CC"),
            (0x2f, "APPLICATION"),
            (0x30, "VENDOR"),
            (0x4f, "VENDOR"),
        ] {
            assert_eq!(class_name(class), Some(name), "{class:#x}");
        }
        for class in [0x00, 0x02, 0x50, 0x80, 0x82, 0xff] {
            assert_eq!(class_name(class), None, "{class:#x}");
        }
        for (class, method, name) in [
            (0x01, 0x01, Some("Get")),
            (0x81, 0x81, Some("GetResp")),
            (0x07, 0x03, Some("Send")),
            (0x03, 0x92, Some("GetTableResp")),
            (0x04, 0x92, None),
            (0x03, 0x83, None),
        ] {
            assert_eq!(method_name(class, method), name, "{class:#x} {method:#x}");
        }
        for (class, attribute, name) in [
            (0x01, 0x02, Some("Notice")),
            (0x01, 0x01, None),
            (0x81, 0x10, Some("NodeDescription")),
            (0x81, 0x11, Some("NodeInfo")),
            (0x01, 0x12, Some("SwitchInfo")),
            (0x01, 0x15, Some("PortInfo")),
            (0x01, 0x16, Some("P_KeyTable")),
            (0x81, 0x20, Some("SMInfo")),
            (0x03, 0x01, Some("ClassPortInfo")),
            (0x03, 0x11, Some("NodeRecord")),
            (0x03, 0x35, Some("PathRecord")),
            (0x03, 0x38, Some("MCMemberRecord")),
            (0x03, 0xf3, Some("InformInfoRecord")),
            (0x04, 0x12, Some("PortCounters")),
            (0x04, 0x1d, Some("PortCountersExtended")),
            (0x06, 0x10, Some("IOUnitInfo")),
            (0x07, 0x01, Some("ClassPortInfo")),
            (0x07, 0x10, Some("REQ")),
            (0x07, 0x18, Some("SIDR_REP")),
            (0x07, 0x1a, Some("APR")),
            (0x07, 0x1d, None),
            (0x09, 0x10, None),
            (0x21, 0x16, Some("CACongestionSetting")),
        ] {
            assert_eq!(attribute_name(class, attribute), name, "{class:#x} {attribute:#x}");
        }
    }

    #[test]
    fn no_name_stands_twice_in_a_class() {
        for class in 0..=u8::MAX {
            let names: Vec<_> = (0..0x200).filter_map(|a| attribute_name(class, a)).collect();
            let methods: Vec<_> = (0..=u8::MAX).filter_map(|m| method_name(class, m)).collect();
            assert_eq!(names.iter().collect::<HashSet<_>>().len(), names.len(), "{class:#x}");
            assert_eq!(methods.iter().collect::<HashSet<_>>().len(), methods.len());
        }
    }
}
